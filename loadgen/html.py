"""placeholder"""

from typing import Any


def run_page(*a: Any) -> str:
    return ""


def sweep_page(*a: Any) -> str:
    return ""
