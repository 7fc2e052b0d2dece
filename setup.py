"""Copies `configs/` into the wheel as `mooncake/configs/`; the rest stands in pyproject.toml.

In an editable installation nothing is copied: the program reads the repository's `configs/`.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONFIGS = Path("configs")


class BuildWithConfigs(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._configs():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *(source for source, _ in self._configs())]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        copied = [] if self.editable_mode else [target for _, target in self._configs()]
        return [*super().get_outputs(include_bytecode), *copied]

    def _configs(self) -> list[tuple[str, str]]:
        """Return each file of `configs/` and where the build puts it."""
        files = sorted(path for path in CONFIGS.rglob("*") if path.is_file())
        return [(str(path), str(Path(self.build_lib, "mooncake", path))) for path in files]


setup(cmdclass={"build_py": BuildWithConfigs})
