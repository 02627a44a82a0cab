// What libtorch_mooncake.so exports: everything else is hidden.
#pragma once
#define TM_API [[gnu::visibility("default")]]
