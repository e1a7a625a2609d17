"""List the scripts and what is recorded of their targets; `python -m benchmarks page` writes docs/benchmarks.md."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path


def main() -> None:
    sys.path[0] = str(Path(__file__).parent)  # not the checkout, whose `etcl_deploy` is only a part of the package
    import page
    from record import say

    if sys.argv[1:] == ["page"]:
        page.write()
        return
    if sys.argv[1:]:
        sys.exit("usage: python -m benchmarks [page]")
    for script in page.SCRIPTS:
        figures = page.figures_of(script)
        targets = " ".join(sorted({figure.target for figure in figures}))
        verdicts = Counter(figure.verdict for figure in figures)
        counts = ", ".join(f"{count} {word}" for word, count in sorted(verdicts.items()))
        say(f"{page.path_of(script).relative_to(page.HERE.parent)!s:34} {targets:12} {counts}")


if __name__ == "__main__":
    main()
