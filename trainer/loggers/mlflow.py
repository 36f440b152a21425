"""MLflow logger for a run that may be restarted."""

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

# MLflow 3.7 allows a folder as store only on request; an unreachable server must not block training for minutes; no
# telemetry. Variables that are set take precedence.
_ENVIRONMENT = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
_NO_KEY = re.compile(r"[^\w/. -]")


class MLFlow(MLFlowLogger):
    """Lightning's ``MLFlowLogger``, which can resume a run; on rank 0 only.

    Existing parameters of the run keep their values, since MLflow refuses to change them.

    Args:
        save_dir: folder of the store without a ``tracking_uri``.
        tracking_uri: of a server, a database or a folder (``file:/path``); `None`: ``save_dir``.
        **options: of Lightning's logger.
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Return a dummy logger on other ranks: even opening the store writes to it."""
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
        """The client, which starts or resumes the run on first use.

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
        """Log the parameters that the run does not have."""
        known = self.experiment.get_run(self.run_id).data.params
        flat = {_NO_KEY.sub("_", key): value for key, value in _flatten_dict(_convert_params(params)).items()}
        super().log_hyperparams({key: value for key, value in flat.items() if key not in known})

    def identify(self) -> dict[str, str]:
        """Return the options that resume the run, and its location under ``at``."""
        uri = str(masked(self._tracking_uri))
        place = {"tracking_uri": uri} if uri.startswith("file:") else {}
        at = f"run {self.run_id} of experiment {self._experiment_name} in {uri}"
        return {"run_id": str(self.run_id), **place, "at": at}

    def link(self, report: str) -> None:
        """Add the report's path to the tags of the run."""
        self.experiment.set_tag(self.run_id, "report", report)
