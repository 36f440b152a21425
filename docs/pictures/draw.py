"""Draw the pictures of README.md and docs/ from real runs: `python docs/pictures/draw.py` (needs chromium; minutes).

`python docs/pictures/draw.py layout` draws layout.svg alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from trainwright.core.layout import Layout

HERE = Path(__file__).parent
MODEL = ("recipe=gpt", "devices=2", "accelerator=cpu", "global_batch_size=8")
LAYOUT = Layout(pipeline=2, shard=2, tensor=2)
COLORS = ("#c7dcf5", "#a3c4ea", "#f8d9b8", "#f0bf8c", "#c9e6c6", "#a5d3a1", "#e3cdee", "#cfaee0")
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


def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    """Return a line of an SVG."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, color: str) -> str:
    """Return a filled rectangle with a text in its middle."""
    area = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{color}" stroke="#ffffff"/>'
    return area + text(x + width / 2, y + height / 2 + 4, words)


def layout_picture(layout: Layout) -> str:
    """Return an SVG of the weights that each rank of a layout holds, and the samples that it reads.

    Args:
        layout: of the axes pipeline, shard and tensor.
    """
    sizes, left, height = layout.sizes, 62, 96 / layout.pipeline  # left of the boxes: room for "stage 1" in wide fonts
    width = (410 - left) / (layout.tensor * layout.shard)
    parts = [text((left + 410) / 2, 20, "weights of one module"), text(555, 20, "samples of one global batch (shard)")]
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        column = place["tensor"] * layout.shard + place["shard"]
        y = 52 + place["pipeline"] * height
        parts.append(box(left + column * width, y, width, height, f"rank {rank}", COLORS[rank]))
    for part in range(layout.tensor):
        parts.append(text(left + (part + 0.5) * width * layout.shard, 44, f"part {part + 1} of layers (tensor)"))
    for stage in range(layout.pipeline):
        parts.append(text(6, 56 + (stage + 0.5) * height, f"stage {stage + 1}", "start"))
    for data_rank in range(layout.data_ranks):
        ranks = ", ".join(str(rank) for rank in range(layout.world_size) if layout.data_rank(rank) == data_rank)
        high = 96 / layout.data_ranks
        parts.append(box(450, 52 + data_rank * high, 210, high, f"samples {data_rank + 1}: ranks {ranks}", "#e4e6ea"))
    typed = " ".join(f"strategy.{axis}={size}" for axis, size in sizes.items() if size > 1)
    parts.append(text(340, 176, f"strategy=hybrid {typed} devices={layout.world_size}"))
    style = 'font-family="sans-serif" font-size="12" fill="#222222"'
    frame = '<rect width="680" height="190" rx="6" fill="#f8f9fb"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 190" width="680" {style}>\n' + "\n".join(
        [frame, *parts, "</svg>\n"]
    )


def main() -> None:
    """Draw a layout, verify five, train a pipeline, and take pictures of both reports."""
    (HERE / "layout.svg").write_text(layout_picture(LAYOUT), encoding="utf-8")
    if sys.argv[1:] == ["layout"]:
        return
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
