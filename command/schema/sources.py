"""Config sources that are read once."""

import copy
from typing import Any

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult


class Repository(ConfigRepository):
    """Repository of read-only sources.

    Hydra copies its repository, with every registered dataclass, for every configuration, which took a third of the
    composition time. A copy may search other sources, but can share the sources themselves.
    """

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        for index, place in enumerate(config_search_path.get_path()):
            if place.path is not None and place.provider is not None and place.path.startswith("pkg://"):
                self.sources[index] = _Package(place.provider, place.path)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Repository":
        found = copy.copy(self)
        found.sources = list(self.sources)
        return found


class _Package(ImportlibResourcesConfigSource):
    """Files of a package, each read once: a sweep composes once per job."""

    def _read_config(self, res: Any) -> ConfigResult:
        if str(res) not in _READ:
            _READ[str(res)] = super()._read_config(res)
        found = copy.copy(_READ[str(res)])
        found.config = copy.deepcopy(found.config)
        return found


_READ: dict[str, ConfigResult] = {}
