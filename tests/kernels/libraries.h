// What the emulation needs of C++'s library; emulated.py compiles it once and has it included first.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>
