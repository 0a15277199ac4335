"""A judge as a separate program: `python judge_program.py PORT [hangs]`.

The judge replies to Chat Completions. It grades an answer as correct if the answer contains 42. It prints its port, and
`asked` for each question. With `hangs`, it reads a question but does not reply.
"""

from __future__ import annotations

import json
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("asked", flush=True)
        if sys.argv[2:] == ["hangs"]:
            time.sleep(3600)
        rules, question = (message["content"] for message in asked["messages"])
        found = re.search(r"GRADE (\w{12})", rules)
        assert found is not None
        (answer,) = re.findall(rf"##### {found[1]} ANSWER\n(.*)\n##### {found[1]} END", question)
        said = {"role": "assistant", "content": f"GRADE {found[1]}: {'C' if '42' in answer else 'I'}"}
        body = json.dumps({"choices": [{"message": said}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Judge)
    print(server.server_address[1], flush=True)
    server.serve_forever()
