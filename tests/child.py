"""The other process of a test (see Child in conftest.py): runs code it reads from stdin, one JSON document a line."""

import ctypes
import json
import signal
import sys

PR_SET_PDEATHSIG = 1
# A test run that is killed takes its children with it, whatever they are at. (Of a child's wrapper, if it has one, the
# same: the parent is whoever forked us.)
if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
    raise OSError(ctypes.get_errno(), "prctl")

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
