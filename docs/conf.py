"""The configuration of Sphinx for the documentation site. ``make_site.py`` lays out its sources and runs it."""

import re
from typing import Any

from sphinx.util.nodes import make_refnode

project = "rdmacm"
author = "the rdmacm authors"
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["_static"]
# A name in an annotation, such as "type", that several classes have too.
suppress_warnings = ["ref.python"]

myst_heading_anchors = 4
myst_heading_slug_func = "make_site.slug"

add_module_names = False
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True}
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries = False

# Prompts and output are not for the clipboard.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = "rdmacm"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_show_copyright = False
templates_path: list[str] = []
pygments_style = "tango"
pygments_dark_style = "monokai"


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("missing-reference", find_by_name)


def link_pages(_app: Any, _kind: str, _name: str, _found: object, _options: object, lines: list[str]) -> None:
    """Docstrings name the pages by their files."""
    lines[:] = [re.sub(r"`{0,2}docs/(\w+)\.md`{0,2}", r":doc:`/\1`", line) for line in lines]


def find_by_name(_app: Any, env: Any, node: Any, inner: Any) -> Any:
    """A reference to a public object by the module that defines it leads to where it is described."""
    if node.get("refdomain") != "py":
        return None
    last = node["reftarget"].lstrip(".").split(".")
    objects = env.domaindata["py"]["objects"]
    for size in range(min(2, len(last)), 0, -1):
        end = "." + ".".join(last[-size:])
        found = [name for name in objects if name.endswith(end)]
        if len(found) == 1:
            return make_refnode(env.app.builder, node["refdoc"], objects[found[0]].docname, found[0], inner, found[0])
    return None
