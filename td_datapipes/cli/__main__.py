"""``python -m td_datapipes.cli`` is ``td-datapipes``."""

from __future__ import annotations

from td_datapipes.cli import main

if __name__ == "__main__":
    main()
