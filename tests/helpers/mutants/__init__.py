"""Random changes of one token in the product, to learn which of them the tests and `verify` find.

    python -m tests.helpers.mutants training/ring training/model --count 200

`sites.py` lists the places and makes a change, `planting.py` plants it when its module is imported, `runs.py` starts
the tests and `verify`, and `configurations.py` lists what `verify` is run on. First everything runs once unchanged and
watched: for each place it is noted which tests and configurations reach it, and whether the change would ever give
another value there. A change that never does is not active. Then each active change is planted, and what reaches it
runs until something fails.
"""
