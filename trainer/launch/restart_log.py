"""What is told of restarts: a line for the terminal, everything in a file of the run directory."""

import sys
import textwrap
from datetime import datetime
from pathlib import Path

LOG_FILE = "restarts.log"


class RestartLog:
    """Tells of failures and restarts.

    Args:
        run_dir: of the run; the file is `logs/restarts.log`, made when there is something to tell.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "logs" / LOG_FILE
        """The file."""

    def tell(self, line: str, details: str = "") -> None:
        """Say one line, and keep it with its details.

        Args:
            line: for the terminal (standard error) and the file.
            details: for the file alone.
        """
        print(f"trainwright: {line}", file=sys.stderr, flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = f"{datetime.now().isoformat(' ', 'milliseconds')} {line}\n"
        if details:
            text += textwrap.indent(details.rstrip(), "    ") + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
