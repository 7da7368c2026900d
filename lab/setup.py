"""The packages of ``wattshift-lab``: this folder is ``lab``, and what it holds is below that."""

from setuptools import find_packages, setup

setup(
    packages=["lab", *(f"lab.{name}" for name in find_packages("."))],
    package_dir={"lab": "."},
    package_data={"lab.bundles": ["*.csv", "*.csv.gz", "*.json"]},
)
