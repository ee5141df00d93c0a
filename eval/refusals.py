"""The options that a cache refuses when it is made, from the refusals that features register (`qkvcache/caches/refusals.py`).

python eval/refusals.py --markdown     the tables of docs/reference/limits.md
"""

from __future__ import annotations

import sys
from itertools import groupby

from qkvcache.caches.refusals import all_refusals


def main(arguments: list[str] | None = None) -> int:
    refusals = sorted(all_refusals(), key=lambda refusal: refusal.wish)
    for wish, group in groupby(refusals, key=lambda refusal: refusal.wish):
        print(f"**{wish}**\n\n| refused | because | instead |\n|---|---|---|")
        for row in dict.fromkeys(refusal.row for refusal in group):
            print("| " + " | ".join(row) + " |")
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
