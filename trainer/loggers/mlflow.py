"""MLflow, in a run that may be started again."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import DummyLogger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from trainwright.core.config.masking import masked
from trainwright.core.lightning_internals import _convert_params, _flatten_dict, _get_rank

# A folder as store needs a word of its own since MLflow 3.7; a server that is gone must not hold training up for
# minutes; and nothing is sent but what is logged. What is set in the environment goes first.
_ENVIRONMENT = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
_NO_KEY = re.compile(r"[^\w/. -]")


class MLFlow(MLFlowLogger):
    """Lightning's ``MLFlowLogger``, which takes up a run again. Only the first rank has one.

    A parameter that the run has already keeps its value, since MLflow refuses another one.

    Args:
        save_dir: folder for what is logged where there is no ``tracking_uri``.
        tracking_uri: of a server, a database or a folder (``file:/path``); `None`: ``save_dir``.
        **options: of Lightning's logger.
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return a logger that does nothing on other ranks: even opening the store writes to it."""
        return DummyLogger() if _get_rank() else super().__new__(cls)

    def __init__(self, save_dir: str = "mlflow", tracking_uri: str | None = None, **options: Any) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow.exceptions import MlflowException

        self._unopened: Exception | None = None
        uri = tracking_uri or f"file:{Path(save_dir).absolute()}"
        try:
            super().__init__(tracking_uri=uri, **options)
        except (OSError, MlflowException) as error:
            self._unopened = error

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The client; the first time it begins the run, or takes it up again.

        Raises:
            MlflowException: if the store or the run cannot be opened.
            OSError: the same.
        """
        if self._unopened is not None:
            raise self._unopened
        is_new = not self._initialized
        client = super().experiment
        if is_new:
            client.update_run(self._run_id, status="RUNNING")
        return client

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Log those parameters that the run does not have."""
        known = self.experiment.get_run(self.run_id).data.params
        flat = {_NO_KEY.sub("_", key): value for key, value in _flatten_dict(_convert_params(params)).items()}
        super().log_hyperparams({key: value for key, value in flat.items() if key not in known})

    def identify(self) -> dict[str, str]:
        """Return the options that lead to the same run, and under ``at`` where it is."""
        uri = str(masked(self._tracking_uri))
        place = {"tracking_uri": uri} if uri.startswith("file:") else {}
        at = f"run {self.run_id} of experiment {self._experiment_name} in {uri}"
        return {"run_id": str(self.run_id), **place, "at": at}

    def link(self, report: str) -> None:
        """Name the report in the tags of the run."""
        self.experiment.set_tag(self.run_id, "report", report)
