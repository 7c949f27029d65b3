"""The site: ``pip install . --group docs && sphinx-build docs build/site``. No GPU, no torch."""

import importlib.util
import os
import tomllib
import urllib.request
from pathlib import Path

from cudagraph_pool.cli.main import parser

PYPROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())


def is_there(page: str) -> bool:
    """A machine that is offline builds the site without links to other sites."""
    try:
        with urllib.request.urlopen(f"{page}objects.inv", timeout=10):
            return True
    except OSError:
        return False


def add_options(app, docname, source):
    """What each command's help says, at the end of the page on the API."""
    if docname == "api":
        (commands,) = (action.choices for action in parser()._actions if action.dest == "command")
        helps = (f"#### {name}\n\n```text\n{of.format_help()}```" for name, of in commands.items())
        source[0] += "\n\n".join(["### Options", *helps])


def setup(app):
    os.environ["COLUMNS"] = "96"  # of the helps
    app.connect("source-read", add_options)


project = "cudagraph_pool"
copyright = "the cudagraph_pool developers"  # noqa: A001
release = PYPROJECT["tool"]["cudagraph_pool"]["version"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"cudagraph_pool {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_theme_options = {
    "source_repository": PYPROJECT["project"]["urls"]["Homepage"],
    "source_branch": "main",
    "source_directory": "docs/",
}
pages = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
}
intersphinx_mapping = {name: (page, None) for name, page in pages.items() if is_there(page)}
copybutton_exclude = ".linenos, .gp, .go"  # prompts and output
myst_heading_anchors = 3
add_module_names = False
autodoc_typehints = "none"  # they stand in the signatures
autodoc_member_order = "bysource"
if importlib.util.find_spec("torch") is None:
    autodoc_mock_imports = ["torch"]
