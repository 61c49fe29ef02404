"""Users who may do just what docs/security.md says of their roles."""

from __future__ import annotations

import re
from pathlib import Path

from servers import Kind, ServerProcess

__all__ = ["PASSWORD", "documented", "guarded_server"]

PASSWORD = "tr0mb0ne-77ab"
PAGE = Path(__file__).parents[1] / "docs" / "security.md"


def documented(role: str) -> str:
    """The rules that the page gives for a role, as one line."""
    found = re.search(rf"```text\nuser {role} on >PASSWORD (.*?)```", PAGE.read_text(), re.DOTALL)
    assert found, role
    return " ".join(found[1].split())


def guarded_server(kind: Kind, *roles: str) -> ServerProcess:
    """A server that has users of these names and roles."""
    users = {role: (PASSWORD, documented(role)) for role in roles}
    return ServerProcess(kind, password="s3cret-for-all", users=users)
