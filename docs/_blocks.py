"""Run every python and bash block of README.md and the documentation, and compare what they print.

    python docs/_blocks.py [FILES] [--jobs 2]

Blocks of one file run in order, in a folder and a process of their own, beside the pictures of `dubito demo`. A text
block right after one is its output: it must agree but for numbers, whose last digits are the machine's, and where it
says `...`. A block that cannot run here is marked above it: `<!-- not run: why -->`.
"""

import argparse
import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(
    r"^(?P<skip><!-- not run[^\n]*-->\n+)?(?P<indent> *)```(?P<language>python|bash)\n(?P<code>.*?)^(?P=indent)```$"
    r"(?:\n+(?P=indent)```text\n(?P<output>.*?)^(?P=indent)```$)?",
    re.DOTALL | re.MULTILINE,
)
_NUMBER = re.compile(r"(?<![\w.])[-−+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")  # noqa: RUF001 (pages write a real minus)
_CHECKER = doctest.OutputChecker()
_LOOSE = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def main() -> None:
    """Run the blocks of all files, each file by a process of its own, a few at once."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("files", nargs="*", type=Path)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--demo", type=Path, help="what `dubito demo` wrote; otherwise it is called first")
    asked = options.parse_args()
    files = [path.resolve() for path in asked.files] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if asked.demo is not None and len(files) == 1:
        sys.exit(run(files[0], asked.demo.resolve()))
    os.environ |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(asked.jobs) as pool:
        demo = asked.demo or Path(place) / "demo"
        if asked.demo is None:
            subprocess.run(["dubito", "demo", "--quiet", "--to", demo], check=True, stdout=subprocess.DEVNULL)
        again = [sys.executable, __file__, "--demo", str(demo)]
        codes = list(pool.map(lambda path: subprocess.run([*again, str(path)], check=False).returncode, files))
    sys.exit(any(codes))


def run(path: Path, demo: Path) -> bool:
    """Run the blocks of one file, print what is wrong with them, and return whether anything is."""
    text, wrong, names, start = path.read_text(), [], {"__name__": "__docs__"}, time.perf_counter()
    blocks = [block for block in _BLOCK.finditer(text) if not block["skip"]]
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        Path("demo").symlink_to(demo)
        for block in blocks:
            where = f"{path.relative_to(ROOT)}:{text[: block.start('code')].count(chr(10)) + 1}"
            code = _dedented(block["code"], block["indent"])
            try:
                printed = _python(code, names, where) if block["language"] == "python" else _bash(code)
            except BaseException:  # a block may also exit
                wrong.append(f"{where} fails\n{traceback.format_exc(limit=-2)}")
                continue
            said = None if block["output"] is None else _dedented(block["output"], block["indent"])
            if said is not None and not _CHECKER.check_output(_rough(said), _rough(printed), _LOOSE):
                wrong.append(f"{where} says\n{said}\nand prints\n{printed}")
        os.chdir(ROOT)
    if blocks:
        print(
            f"{path.relative_to(ROOT)}: {len(blocks)} blocks, {time.perf_counter() - start:.0f} s", *wrong, sep="\n\n"
        )
    return bool(wrong)


def _python(code: str, names: dict[str, Any], where: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, where, "exec"), names)
    return printed.getvalue()


def _bash(code: str) -> str:
    done = subprocess.run(["bash", "-e", "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def _dedented(text: str, indent: str) -> str:
    return "\n".join(line.removeprefix(indent) for line in text.split("\n"))


def _rough(text: str) -> str:
    """Without numbers, and without the lines whose length hangs on them."""
    return re.sub("─+", "─", _NUMBER.sub("0", text))


if __name__ == "__main__":
    main()
