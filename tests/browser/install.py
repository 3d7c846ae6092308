"""Find or install what the tests that drive pages need, a Chromium and axe-core: `make browser`.

    python tests/browser/install.py [FOLDER]        prints the path of the browser; FOLDER is .venv/browser by default

Tried in this order, and the first browser that opens a page is used: one on the PATH; what an earlier run installed;
Playwright's own download; the npm package @sparticuz/chromium, which needs npm but no root; Debian's chromium, where
apt-get may be called as root. axe-core, which checks accessibility, is an npm package and needs npm. Nothing outside
FOLDER is changed, except by apt-get.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv" / "browser"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--lang=en-US"]
"""The sandbox needs rights that containers and root do not have; tests open their own pages alone."""
AXE = "axe-core@4.14.0"
"""Another version may have other rules."""


def find(folder: Path = FOLDER) -> Path | None:
    """The first browser that works, without installing any."""
    return next((path for path in _installed(folder) if works(path)), None)


def install(folder: Path = FOLDER) -> Path | None:
    """A browser that works, installed if there is none; None where none can be had."""
    if (path := find(folder)) is not None:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    for name, attempt in (("Playwright", _playwright), ("npm", _npm), ("apt-get", _apt)):
        print(f"browser: trying {name}", file=sys.stderr)
        try:
            attempt(folder)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"browser: not by {name} ({type(error).__name__})", file=sys.stderr)
        if (path := find(folder)) is not None:
            return path
    return None


def find_axe(folder: Path = FOLDER) -> Path | None:
    """The script of axe-core, if it was installed."""
    path = folder / "node_modules" / "axe-core" / "axe.min.js"
    return path if path.is_file() else None


def install_axe(folder: Path = FOLDER) -> Path | None:
    """The script of axe-core, installed if it is not there; None where npm is missing or fails."""
    if find_axe(folder) is None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _npm_install(folder, AXE)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"browser: no {AXE} ({type(error).__name__})", file=sys.stderr)
    return find_axe(folder)


def works(path: Path) -> bool:
    """Whether Playwright can open a page with it."""
    from playwright.sync_api import Error, sync_playwright  # noqa: PLC0415 (setup may run before it is there)

    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=OPTIONS, timeout=30_000)
            browser.new_page().goto("about:blank")
            browser.close()
    except Error:
        return False
    return True


def _installed(folder: Path) -> Iterator[Path]:
    yield from (Path(path) for path in map(shutil.which, NAMES) if path)
    yield from (path for path in [folder / "chromium"] if path.is_file())
    for name in ("chrome-headless-shell", "headless_shell", "chrome"):
        yield from (path for path in sorted(folder.glob(f"*/*/{name}")) if os.access(path, os.X_OK))


def _playwright(folder: Path) -> None:
    command = [sys.executable, "-m", "playwright", "install", "chromium-headless-shell"]
    _run(command, environment={"PLAYWRIGHT_BROWSERS_PATH": str(folder)})


def _npm(folder: Path) -> None:
    """The package unpacks its browser into the folder for temporary files."""
    if _npm_install(folder, "@sparticuz/chromium"):
        unpack = 'import("@sparticuz/chromium").then((module) => module.default.executablePath())'
        _run([shutil.which("node") or "node", "-e", unpack], environment={"TMPDIR": str(folder)}, cwd=folder)


def _npm_install(folder: Path, package: str) -> bool:
    """Whether npm is there, and has installed the package."""
    npm = shutil.which("npm")
    if npm is not None:
        _run([npm, "install", "--no-fund", "--no-audit", "--prefix", str(folder), package])
    return npm is not None


def _apt(_: Path) -> None:
    if hasattr(os, "geteuid") and os.geteuid() == 0 and (apt := shutil.which("apt-get")):
        _run([apt, "update"])
        _run([apt, "install", "--yes", "--no-install-recommends", "chromium"])


def _run(command: list[str], *, environment: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    subprocess.run(
        command,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"} | (environment or {}),
        cwd=cwd,
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=600,
    )


def main() -> int:
    """Print the browser's path, or how to get what is missing."""
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else FOLDER
    path, axe = install(folder), install_axe(folder)
    if path is None:
        print(
            "browser: none found and none could be installed. Tests in tests/browser are skipped. Install Chromium or "
            "Google Chrome, or npm, and run `make browser` again.",
            file=sys.stderr,
        )
    else:
        print(path)
    if axe is None:
        print(
            "browser: axe-core could not be installed. Tests of accessibility are skipped. Install npm and run "
            "`make browser` again.",
            file=sys.stderr,
        )
    return int(path is None or axe is None)


if __name__ == "__main__":
    sys.exit(main())
