"""Hooks of the documentation site: the home page, links to source files, and complete reference.

MkDocs runs them (mkdocs.yml).  A warning here ends `make docs`, which is strict.
"""

import logging
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/penstock-ml/penstock/blob/main/"
PICTURES = "https://raw.githubusercontent.com/penstock-ml/penstock/main/docs/"
PUBLIC = ("penstock", "penstock.schedules")
log = logging.getLogger("mkdocs.hooks")

_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s#]+)((?:#[^)\s]*)?\))")
_DIRECTIVE = re.compile(r"^::: (\S+)", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert the README into the home page, and point links outside of docs/ to the source."""
    here = page.file.src_uri
    if here == "index.md":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        markdown = markdown.replace("<!-- README.md -->", _within_site(readme))
    return _LINK.sub(lambda found: _to_source(found, here), markdown)


def _within_site(readme: str) -> str:
    """Return the README with its absolute links to pages and pictures of docs/ made relative."""
    return readme.replace(f"{SOURCE}docs/", "").replace(PICTURES, "")


def _to_source(found: re.Match[str], here: str) -> str:
    """Return a link as it is, or with the address of the file of the repository it names."""
    before, target, after = found.groups()
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(here), target))
    if path.startswith("docs/"):
        return found.group()
    if not (ROOT / path).exists():
        log.warning("%s: the link %s names no file of the repository", here, target)
    return f"{before}{SOURCE}{path}{after}"


def on_files(files: Any, config: Any) -> None:
    """Warn of public names that the reference leaves out, repeats, or has no docstring for."""
    pages = sorted(Path(config["docs_dir"]).glob("reference/*.md"))
    shown = [name for page in pages for name in _DIRECTIVE.findall(page.read_text("utf-8"))]
    for problem in problems(shown):
        log.warning("reference: %s", problem)


def problems(shown: list[str]) -> list[str]:
    """Compare the names of the reference with the public ones; return one line per difference."""
    loaded = _package()
    shown = [_public_name(name) for name in shown]
    public = [
        f"{module}.{name}"
        for module in PUBLIC
        for name in _exports(ROOT / module.replace(".", "/") / "__init__.py")
        if f"{module}.{name}" not in PUBLIC
    ]
    found = [f"{name} is public and on no page" for name in public if name not in shown]
    found += [f"{name} is on a page and not public" for name in shown if name not in public]
    found += [f"{name} appears twice" for name in sorted({n for n in shown if shown.count(n) > 1})]
    for name in public:
        value = _target(loaded[name.removeprefix("penstock.")])
        if value.is_module:  # a file of the same name: the page names `module.name.name`
            value = _target(value[value.name])
        if value.docstring is None or not value.docstring.value.strip():
            found.append(f"{name} has no docstring ({value.path})")
    return found


@cache
def _package() -> Any:
    """Read the package once, without importing it."""
    import griffe

    return griffe.load("penstock", search_paths=[ROOT], resolve_aliases=True)


def _public_name(shown: str) -> str:
    """Return the public name of a directive: a function is also in the file of its name."""
    home, _, name = shown.rpartition(".")
    return home if home.endswith(f".{name}") else shown


def _target(value: Any) -> Any:
    """Return the object that a name, imported or not, stands for."""
    return value.final_target if value.is_alias else value


def _exports(file: Path) -> list[str]:
    """Return the names in a module's `__all__`, without importing it."""
    import ast

    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    return []
