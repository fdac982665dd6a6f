// What the emulation needs of C++'s library; emulated.py compiles it once and has it included first.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <ucontext.h>
#include <vector>
