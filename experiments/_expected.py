"""What an experiment found, kept beside the script in `expected/`, with the command that finds it again."""

import json
from pathlib import Path
from typing import Any


def write_expected(to: Path, options: str, result: dict[str, Any], **head: str) -> None:
    """The file of the script of the same name: its command, what else should stand above the result, the result."""
    command = f"python experiments/{to.stem}.py {options} --write"
    to.write_text(json.dumps({"command": command} | head | result, indent=1) + "\n")
