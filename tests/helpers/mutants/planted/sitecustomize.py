"""Change the product as it is imported. Python imports this module by itself if its folder is on PYTHONPATH."""

from tests.helpers.mutants.planting import install

install()
