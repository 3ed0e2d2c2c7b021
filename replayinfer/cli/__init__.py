"""The command line: parses and prints only; each command is a file that loads when it is called."""
