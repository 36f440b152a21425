"""Draw the pictures of README.md and docs/ from real runs: `python docs/pictures/draw.py` (needs chromium; minutes)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MODEL = ("recipe=gpt", "devices=2", "accelerator=cpu", "global_batch_size=8")
LAYOUTS = "strategy=ddp,zero3,tensor,pipeline,context"


def trainwright(*words: str, folder: Path) -> None:
    """Run a command in a folder."""
    subprocess.run([sys.executable, "-m", "trainwright", *words], cwd=folder, check=True)


def screenshot(page: Path, picture: Path, width: int, height: int) -> None:
    """Take a picture of the top of a page, in light colors."""
    browser = shutil.which("chromium")
    if browser is None:
        raise SystemExit("chromium was not found; install it to draw the pictures")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")
    with tempfile.TemporaryDirectory() as profile:
        size = (f"--window-size={width},{height}", f"--user-data-dir={profile}", f"--screenshot={picture}")
        subprocess.run([browser, *flags, *size, page.as_uri()], check=True, capture_output=True)


def main() -> None:
    """Verify five layouts, train a pipeline, and take pictures of both reports."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ("verify", "-m", *MODEL, "micro_batch_size=4", LAYOUTS, "verify.steps=2", "--report", "verify.html")
        trainwright(*words, folder=folder)
        screenshot(folder / "verify.html", HERE / "verify.png", 1000, 470)
        trainwright("fit", *MODEL, "strategy=pipeline", "micro_batch_size=8", "max_steps=60", "run_dir=run",
                    "trainer.log_every_n_steps=5", folder=folder)  # fmt: skip
        screenshot(folder / "run" / "report.html", HERE / "report.png", 1200, 900)


if __name__ == "__main__":
    main()
