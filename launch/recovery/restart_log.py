"""Log of failures and restarts: one line on the terminal, details in a file of the run directory."""

import sys
import textwrap
from datetime import datetime
from pathlib import Path

LOG_FILE = "restarts.log"


class RestartLog:
    """Log of failures and restarts.

    Args:
        run_dir: of the run; the file is `logs/restarts.log`, created with the first entry.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "logs" / LOG_FILE
        """The file."""

    def tell(self, line: str, details: str = "") -> None:
        """Print one line, and append it to the file with its details.

        Args:
            line: for the terminal (standard error) and the file.
            details: for the file only.
        """
        print(f"trainwright: {line}", file=sys.stderr, flush=True)
        text = f"{datetime.now().isoformat(' ', 'milliseconds')} {line}\n"
        if details:
            text += textwrap.indent(details.rstrip(), "    ") + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # a full disk must neither end the run nor hide the reason of the failure
            print(f"trainwright: {self.path} cannot be written ({error}); the entry was:\n{text}", file=sys.stderr)
