"""A run as one HTML page that needs no other file or host.

`files.py` reads what a run folder says, forgivingly; `tiles.py`, `chart.py` and `style.py` are parts of the
page. Imports `training.run_folder` and the YAML reader. Begin with `page.py`.
"""
