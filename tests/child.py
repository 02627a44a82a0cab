"""The other process of a test (see Child in conftest.py): runs code it reads from stdin, one JSON document a line."""

import json
import sys

names: dict = {}
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    request = json.loads(line)
    names.update(request["names"], result=None)
    try:
        exec(request["code"], names)
        answer = {"result": names["result"]}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
