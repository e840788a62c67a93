"""Sphinx: the documentation site, built by `make docs` into out/docs.

Pages are Markdown (MyST).  Those that begin with a notebook header are executed while the site is built, by
MyST-NB, each in a kernel of its own; an error in a cell fails the build, and so does any warning.
"""

import datetime
import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

import embedded_graph_page  # noqa: E402
import forked_jupyter_kernels  # noqa: E402
import light_and_dark_pictures  # noqa: E402
import lines_that_break  # noqa: E402

project = "lazyviz"
author = "the lazyviz maintainers"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["examples/*"]

html_theme = "furo"
html_title = "lazyviz"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_show_copyright = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # pages of the repository begin sections as GitHub allows

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove"  # messages of libraries about their settings
if turns := int(os.environ.get("LAZYVIZ_DOCS_TURNS", 0)):
    # `make test` executes each page once in so many days; the others get no outputs.
    day = datetime.date.today().toordinal()
    executed = [
        page.relative_to(HERE).as_posix()
        for page in sorted(HERE.rglob("*.md"))
        if "{code-cell}" in page.read_text(encoding="utf-8")
    ]
    nb_execution_excludepatterns = [page for at, page in enumerate(executed) if (at - day) % turns]
    suppress_warnings += ["myst-nb.lexer"]  # the kernel names the language
# A static site has no kernel: show the pictures of saved notebooks; embedded_graph_page.interactive() embeds
# the rest.
nb_mime_priority_overrides = [
    ("html", "text/html", 0),
    ("html", "application/vnd.jupyter.widget-view+json", None),
]

# Kernels are children of this process.
os.environ["LAZYVIZ_WIDGET"] = "0"
os.environ["LAZYVIZ_PROGRESS"] = "0"  # progress bars are widgets, which pages would load from other sites
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
forked_jupyter_kernels.start()


# Pages that are files of the repository outside the docs folder.
SHOWN = {
    "project/architecture": "ARCHITECTURE.md",
    "project/contributing": "CONTRIBUTING.md",
    "project/changelog": "CHANGELOG.md",
    "project/security": "SECURITY.md",
}
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
SENT_ALONG = (".svg", ".png", ".json")  # pictures and results from other folders: shown, or to download


def read(app, docname, source):
    """Insert the repository's own pages, and redirect links to its files to pages of the site."""
    shown = SHOWN.get(docname)
    if shown is not None:
        source[0] = (ROOT / shown).read_text(encoding="utf-8")
    folder = ROOT if shown is not None else (HERE / docname).parent
    pages = {ROOT / file: f"/{page}.md" for page, file in SHOWN.items()} | {ROOT / "README.md": "/index.md"}

    def point(match):
        text, target, anchor = match[1], match[2], match[3] or ""
        path = Path(os.path.normpath(folder / target))
        if path in pages:
            return f"[{text}]({pages[path]}{anchor if path.name != 'README.md' else ''})"
        if path.is_relative_to(HERE) and path != HERE:
            return f"[{text}](/{path.relative_to(HERE).as_posix()}{anchor})"
        if path.suffix in SENT_ALONG and path.exists():
            return f"[{text}]({os.path.relpath(path, (HERE / docname).parent)})"
        # A file of the repository that is not part of the site: keep only its name.
        return text if path.exists() else match[0]

    source[0] = LINK.sub(point, source[0])


def without_constructor(app, what, name, obj, options, signature, returns):
    """Leave out the signature of a class whose `__init__` is excluded: users do not construct it."""
    if what == "class" and "__init__" in (getattr(options, "exclude_members", None) or ()):
        return "", None
    return None


def no_types_of_properties(app, what, name, obj, options, lines):
    """Keep Napoleon from taking the words before a colon for a type: a property's type is annotated."""
    if what == "property":
        lines[:0] = ["..", ""]


def draw(app, pagename, templatename, context, doctree):
    """Show what the gallery's pages show in its list, and let the pictures of a page follow its theme."""
    if pagename == "gallery/index":
        context["body"] = embedded_graph_page.with_pictures(context["body"], Path(app.outdir) / "graphs")
    if "body" in context:
        body = light_and_dark_pictures.with_dark_ones(context["body"])
        context["body"] = lines_that_break.with_broken_lines(body)


def setup(app):
    """Tell kernels where to write the interactive pages of graphs."""
    graphs = Path(app.outdir) / "graphs"
    graphs.mkdir(parents=True, exist_ok=True)
    os.environ["LAZYVIZ_DOCS_GRAPHS"] = str(graphs)
    app.connect("source-read", read)
    app.connect("html-page-context", draw)
    app.connect("autodoc-process-signature", without_constructor)
    app.connect("autodoc-process-docstring", no_types_of_properties, priority=400)  # before Napoleon
    return {"parallel_read_safe": True}
