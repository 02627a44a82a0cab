// Other threads may need the GIL to end (callbacks of futures); who waits for them must not hold it.
#pragma once

#include <Python.h>

namespace torch_mooncake::dist {

class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace torch_mooncake::dist
