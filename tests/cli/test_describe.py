"""``replayinfer describe``: what it prints, as a table and as JSON, and what it refuses."""

import json

import pytest

pytest.importorskip("typer", reason="the cli extra is not installed")
pytest.importorskip("rich", reason="the cli extra is not installed")

from replayinfer.cli.app import run
from replayinfer.spec.presets import PRESETS

SMALL = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEM*-",
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "ssm_state_size": 16,
    "n_groups": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "torch_dtype": "float32",
}


@pytest.fixture
def describe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # rich wraps to the terminal's width

    def call(*arguments):
        status = run(["describe", *map(str, arguments)])
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def small(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def described(result):
    status, out, err = result
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    return json.loads(out)


def test_json_of_a_preset(describe):
    found = described(describe("nemotron-3-super", "--json"))
    assert found["layers"] == 88
    assert found["hub_id"] == PRESETS["nemotron-3-super"].hub_id
    assert (found["ssm"]["family"], found["ssm"]["heads"]) == ("mamba2", 128)
    assert found["ssm"]["layers"][:3] == [0, 2, 4]
    assert found["ssm"]["dt_limit"] == [0.0, None]
    assert found["attention"] == {
        "layers": [7, 16, 25, 36, 47, 58, 69, 78],
        "latent": False, "heads": 32, "kv_heads": 2, "head_dim": 128,
    }  # fmt: skip
    row = 128 * 64 * 2 + 8 * 128 * 2 + 128 * 4
    state, ring = 40 * 128 * 64 * 128 * 4, 40 * 4 * (128 * 64 + 2 * 8 * 128) * 2
    sequence = state + 40 * 16 * row + ring
    assert found["bytes"] == {
        "checkpoint_page": state, "input_page": 40 * 8 * row, "rows": 40 * 16 * row,
        "conv_ring": ring, "sequence": sequence, "kv_per_token": 8 * 2 * 2 * 128 * 2,
    }  # fmt: skip
    assert found["rows_share"] == pytest.approx(40 * 16 * row / sequence)
    assert found["kv_equals_state_at"] == 20480
    assert found["kv_equals_sequence_at"] == -(-sequence // 8192)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_described(name, describe):
    status, out, err = describe(name)
    assert (status, err) == (0, "")
    assert PRESETS[name].hub_id in out
    assert "context where KV = SSM state" in out
    assert out.count("assumed") == len(PRESETS[name].assumed)
    found = described(describe(name, "--json"))
    assert found["assumed"] == list(PRESETS[name].assumed)
    letter = {"mamba2": "M", "gdn": "G", "kda": "K"}[found["ssm"]["family"]]
    assert found["layer_map"].count(letter) == len(found["ssm"]["layers"])


def test_table(describe):
    status, out, _ = describe("nemotron-3-super", "--capacity", 32)
    assert status == 0
    assert "128 heads x 64 x 128, 8 groups" in out
    assert "32 heads, 2 key/value heads x 128" in out
    assert "40 layers x 128 x 64 x 128 x 4 B" in out
    assert "167772160 (160 MiB)" in out
    assert "checkpoint page + 4 x input page + ring" in out
    assert "20480 tokens" in out
    assert "M-M-M-M*-M-M-M-M*" in out


def test_table_of_a_latent_and_of_both_in_one_layer(describe, tmp_path):
    assert "7 layers x (512 + 64) x 2 B" in describe("kimi-linear")[1]
    (tmp_path / "config.json").write_text('{"model_type": "falcon_h1", "num_hidden_layers": 3}')
    out = describe(tmp_path)[1]
    assert "+++" in out
    assert "a recurrence and attention in one layer" in out


def test_a_path_with_every_option(describe, small):
    options = ["--format", "bf16", "--capacity", 5, "--max-window", 3, "--dtype", "float16"]
    found = described(describe(small, *options, "--tp", 2, "--json"))
    assert (found["tp"], found["format"], found["dtype"]) == (2, "bf16", "float16")
    assert found["config_dtype"] == "float32"
    assert (found["ssm"]["heads"], found["ssm"]["groups"]) == (4, 1)
    assert (found["attention"]["heads"], found["attention"]["kv_heads"]) == (2, 1)
    row = 4 * 4 * 2 + 16 * 2 + 4 * 4
    assert (found["page_rows"], found["input_pages"], found["ring_rows"]) == (8, 1, 6)
    state, page, ring = 2 * 4 * 4 * 16 * 2, 2 * 8 * row, 2 * 6 * (16 + 2 * 16) * 2
    assert found["bytes"] == {
        "checkpoint_page": state, "input_page": page, "rows": page, "conv_ring": ring,
        "sequence": state + page + ring, "kv_per_token": 2 * 1 * 8 * 2,
    }  # fmt: skip
    assert found["source"] is None


def test_the_config_decides_the_dtype(describe, small):
    assert described(describe(small, "--json"))["dtype"] == "float32"
    (small / "config.json").write_text(json.dumps(SMALL | {"torch_dtype": None}))
    assert described(describe(small / "config.json", "--json"))["dtype"] == "bfloat16"


def test_without_attention(describe, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    found = described(describe(tmp_path, "--json"))
    assert (found["attention"], found["bytes"]["kv_per_token"]) == (None, 0)
    assert found["kv_equals_state_at"] is found["kv_equals_sequence_at"] is None
    status, out, _ = describe(tmp_path)
    assert status == 0
    assert "key/value" not in out


def test_a_sharded_table_says_so(describe):
    assert "each of 4 tensor-parallel ranks" in describe("qwen3-next", "--tp", 4)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-model"], "PATH_OR_NAME: got 'no-such-model'; allowed a config.json"),
        (["qwen3-next", "--tp", "3"], "tp: got 3; allowed a divisor of heads=32"),
        (["qwen3-next", "--tp", "0"], "tp: got 0; allowed an integer >= 1"),
        (["qwen3-next", "--format", "fp8"], "format: got 'fp8'; allowed fp32, fp32_split"),
        (["qwen3-next", "--dtype", "float64"], "dtype: got 'float64'; allowed float32"),
        (["qwen3-next", "--capacity", "0"], "capacity: got 0; allowed an integer >= 1"),
        (["qwen3-next", "--max-window", "17"], "capacity: got 16; allowed >= max_window=17"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, describe):
    status, out, err = describe(*arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ('{"model_type": "llama"}', "model_type: got 'llama'; allowed nemotron_h"),
        ('{"model_type": "mamba2", "num_heads": 3}', "num_heads: got 3 with head_dim=64"),
        (
            '{"model_type": "bamba", "num_hidden_layers": 1, "attn_layer_indices": [0]}',
            "recurrence",
        ),
    ],
)
def test_a_bad_config_is_one_line_and_status_2(text, message, describe, tmp_path):
    (tmp_path / "config.json").write_text(text)
    status, out, err = describe(tmp_path)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err


def test_missing_and_unknown_arguments(describe):
    for arguments in ([], ["qwen3-next", "--nonsense"], ["qwen3-next", "--capacity", "many"]):
        status, _, err = describe(*arguments)
        assert status == 2
        assert err.count("\n") == 1
