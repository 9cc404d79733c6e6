"""Puts the YAML files of ``configs/`` into the wheel as ``megastack/configs``; all else is in pyproject.toml.

The files live at the top of the repository, where a reader looks for them. pyproject.toml alone can either find
packages or map a folder to another place, not both.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megastack", "megastack.*"]), "megastack.configs"],
    package_dir={"megastack.configs": "configs"},
    package_data={"megastack": ["py.typed"], "megastack.configs": ["*.yaml", "*/*.yaml"]},
)
