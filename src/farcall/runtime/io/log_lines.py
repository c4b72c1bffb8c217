"""Log lines that say what a member, or a stranger, chose: its name, a function's, the text of an error.

Such a text could begin a line that looks like one of farcall's own, or move the cursor of a terminal. So an event is
one line of printable characters, whoever handles it; below it, the lines of a traceback are indented. Whoever logs need
not escape anything.
"""

from __future__ import annotations

import logging
import traceback


class LogLines(logging.Filter):
    """A filter of the logger ``farcall``: changes records, and lets all of them pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except Exception:
            return True  # an argument cannot be printed: handlers report that, and raise nothing
        if not message.isprintable():
            record.msg, record.args = printable(message), ()
        if record.exc_info and not record.exc_text:  # formatters take this text, if it is there
            lines = "".join(traceback.format_exception(*record.exc_info)).splitlines()
            record.exc_text = "\n".join(f"  {printable(line)}" for line in lines)
        return True


def printable(text: str) -> str:
    """``text`` with escapes in the places of control characters, line ends and marks that change its direction."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
