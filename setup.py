"""What pyproject.toml cannot say: where the packages lie, and two files at the wheel's root.

``hooks/`` and ``lora/`` stand at the top of the repository and are installed below ``qpatch``.
``qpatch.pth`` and ``qpatch.start`` go to the root of site-packages; setuptools has no
declarative way to put a file there, so a build sub-command lays them (an editable install
runs the same command, and gets them too).
"""

from pathlib import Path
from shutil import rmtree

from setuptools import Command, find_packages, setup
from setuptools.command.build import build

STARTUP_FILES = ("qpatch.pth", "qpatch.start")


class BuildStartupFiles(Command):
    """Copy the start-up files beside the packages (setuptools' SubCommand protocol)."""

    description = "copy qpatch.pth and qpatch.start to the root of site-packages"
    user_options = []
    editable_mode = False

    def initialize_options(self):
        self.build_lib = None

    def finalize_options(self):
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def _target(self):
        # In editable mode build_lib is thrown away; what lands in the wheel is install_lib.
        return self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib

    def run(self):
        target = self._target()
        self.mkpath(target)
        for name in STARTUP_FILES:
            self.copy_file(name, str(Path(target) / name))

    def get_source_files(self):
        return list(STARTUP_FILES)

    def get_outputs(self):
        return [str(Path(self._target()) / name) for name in STARTUP_FILES]

    def get_output_mapping(self):
        return {str(Path(self.build_lib) / name): name for name in STARTUP_FILES}


class Build(build):
    sub_commands = [*build.sub_commands, ("build_startup_files", None)]

    def run(self):
        # What an earlier build left there would be packed again, also modules that are gone since.
        # Only where it is setuptools' own working folder: with --build-lib it can be anybody's.
        if Path(self.build_base).resolve() in Path(self.build_lib).resolve().parents:
            rmtree(self.build_lib, ignore_errors=True)
        super().run()


def packages():
    """The engine's packages, and those of hooks/ and lora/ under their installed names."""
    found = find_packages(include=["qpatch", "qpatch.*"])
    for top in ("hooks", "lora"):
        found += [f"qpatch.{name}" for name in find_packages(include=[top, f"{top}.*"])]
    return found


setup(
    packages=packages(),
    package_dir={"qpatch.hooks": "hooks", "qpatch.lora": "lora"},
    cmdclass={"build": Build, "build_startup_files": BuildStartupFiles},
)
