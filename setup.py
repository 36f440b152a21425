"""The README for package indexes: links that are relative in the repository become absolute."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

source = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]
readme = Path("README.md").read_text(encoding="utf-8")
for link, base in ((r"(!\[[^\]]*\]\()", "raw"), (r"((?<!!)\[[^\]]*\]\()", "blob")):
    readme = re.sub(link + r"(?!https?:|#)", rf"\1{source}/{base}/main/", readme)
setup(long_description=readme, long_description_content_type="text/markdown")
