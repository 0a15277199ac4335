"""An agent program in pure bash. It makes one model call over HTTP and then runs the commands that the test gives."""

from __future__ import annotations

from typing import Any

PROGRAM = """
setsid sleep 4010 & (sleep 4010 &)
url=${OPENAI_BASE_URL#http://}; address=${url%%/*}
ask() {
    exec 3<>"/dev/tcp/${address%:*}/${address#*:}" || exit 9
    body='{"model": "m", "messages": [{"role": "user", "content": "'$OUTRIDER_INSTRUCTION'"}]}'
    printf '%s\\r\\n' "POST /${url#*/}/chat/completions HTTP/1.1" "Host: x" "Connection: close" \\
        "Content-Length: ${#body}" "" >&3
    printf %s "$body" >&3
    answer=$(cat <&3)
}
ask
eval "$1"
"""


def program(then: str) -> dict[str, Any]:
    """Return a harness whose program evaluates `then` after the first call. `then` may call `ask` again and read
    $answer."""
    return {"command": ["bash", "-c", PROGRAM, "agent", then]}
