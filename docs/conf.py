"""The site: ``pip install '.[docs]' && sphinx-build docs build/site``. Neither GPU nor torch."""

import importlib.util

project = "cudagraph_pool"
copyright = "the cudagraph_pool developers"  # noqa: A001
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "cudagraph_pool"
myst_heading_anchors = 3
add_module_names = False
autodoc_typehints = "none"  # they stand in the signatures
autodoc_member_order = "bysource"
if importlib.util.find_spec("torch") is None:
    autodoc_mock_imports = ["torch"]
