"""SGLang's own parser, plugin loader and publication of arguments, case by case, in one process.

``python sglang_parse.py '{"name": [flags ...], ...}'`` prints what became of each: ``ok``, or the
line of the refusal.
"""

from __future__ import annotations

import json
import sys

from sglang_runs import MARK


def main() -> None:
    cases: dict[str, list[str]] = json.loads(sys.argv[1])
    from sglang.srt.plugins import load_plugins

    load_plugins()
    ours = [name for name in sys.modules if name.startswith("replayinfer")]
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    said = {}
    for name, flags in cases.items():
        try:
            arguments = prepare_server_args(flags)
            arguments.resolve_once()
            publish(arguments, role="tokenizer")
            said[name] = "ok"
        except (Exception, SystemExit) as error:
            said[name] = f"{type(error).__name__}: {error}"
    print(MARK + json.dumps({"said": said, "loaded": ours}), flush=True)


if __name__ == "__main__":
    main()
