/* What a program needs that is built without a C library: system calls, memory and text, files, the last word.
 *
 * The launcher starts for every compilation, and a C library's own start takes longer than all it does: so it talks
 * to the kernel itself, on the two processors that this is for. The program that includes this defines `begin`.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/syscall.h>

static char **variables; /* the environment; `begin` finds it on the stack */

#if defined(__x86_64__)
__asm__(".globl _start\n_start:\n xor %ebp, %ebp\n mov %rsp, %rdi\n and $-16, %rsp\n call begin\n hlt\n");
static inline long call6(long n, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
__asm__(".globl _start\n_start:\n mov x29, #0\n mov x30, #0\n mov x0, sp\n and sp, x0, #-16\n bl begin\n brk #1\n");
static inline long call6(long n, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = n, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
#else
#error "the launcher knows x86-64 and aarch64"
#endif
/* Each returns minus an error number where the C library would return -1. */
#define CALL_(n, a, b, c, d, e, f, ...) call6(SYS_##n, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define CALL(n, ...) CALL_(n, __VA_ARGS__, 0, 0, 0, 0, 0, 0)
#define NOTHING __asm__ volatile("") /* so that a loop is not made a call of the function that it is */

void *memcpy(void *to, const void *from, size_t n) {
    for (size_t i = 0; i < n; i++) {
        ((char *)to)[i] = ((const char *)from)[i];
        NOTHING;
    }
    return to;
}

void *memset(void *to, int byte, size_t n) {
    for (size_t i = 0; i < n; i++) {
        ((char *)to)[i] = (char)byte;
        NOTHING;
    }
    return to;
}

size_t strlen(const char *text) {
    size_t n = 0;
    for (; text[n]; n++) NOTHING;
    return n;
}

static int same(const char *a, const char *b) {
    while (*a && *a == *b) a++, b++;
    return *a == *b;
}

/* What follows a beginning, or NULL. */
static const char *after(const char *text, const char *beginning) {
    while (*beginning && *text == *beginning) text++, beginning++;
    return *beginning ? NULL : text;
}

static char *last_of(char *text, char sought) {
    char *found = NULL;
    for (; *text; text++)
        if (*text == sought) found = text;
    return found;
}

static char *find(char *text, const char *sought) {
    for (; *text; text++)
        if (after(text, sought)) return text;
    return NULL;
}

static long number(const char *text) {
    long value = 0, sign = *text == '-' ? -1 : 1;
    for (text += sign < 0; *text >= '0' && *text <= '9'; text++) value = 10 * value + *text - '0';
    return sign * value;
}

/* Put texts, up to a NULL, one behind the other; 0 if there is no room for them. */
static size_t join(char *to, size_t size, ...) {
    va_list texts;
    size_t used = 0;
    va_start(texts, size);
    for (const char *text; (text = va_arg(texts, const char *));) {
        size_t n = strlen(text);
        if (used + n >= size) {
            used = 0;
            break;
        }
        memcpy(to + used, text, n);
        used += n;
    }
    va_end(texts);
    to[used] = 0;
    return used;
}

/* A number as text, in one of a few places that are used in turn. */
static const char *decimal(long value) {
    static char places[8][24];
    static int turn;
    char *end = places[turn++ % 8] + 23;
    unsigned long rest = value < 0 ? -(unsigned long)value : (unsigned long)value;
    *end = 0;
    do *--end = (char)('0' + rest % 10);
    while (rest /= 10);
    if (value < 0) *--end = '-';
    return end;
}

static const char *variable(const char *name) {
    for (char **e = variables; *e; e++) {
        const char *rest = after(*e, name);
        if (rest && *rest == '=') return rest + 1;
    }
    return NULL;
}

static long open_file(const char *path, int flags) { return CALL(openat, AT_FDCWD, path, flags | O_CLOEXEC, 0); }
static void close_file(long fd) { CALL(close, fd); }

__attribute__((noreturn)) static void leave(int code) {
    for (;;) CALL(exit_group, code);
}

static void write_all(int fd, const char *data, size_t size) {
    while (size > 0) {
        long n = CALL(write, fd, data, size);
        if (n == -EINTR) continue;
        if (n == -EAGAIN) {
            struct pollfd wait = {.fd = fd, .events = POLLOUT};
            CALL(ppoll, &wait, 1, NULL, NULL, 0);
            continue;
        }
        if (n <= 0) return;
        data += n;
        size -= n;
    }
}

static void say(const char *a, const char *b, const char *c) {
    char text[8192];
    write_all(2, text, join(text, sizeof text, "fewbits build: ", a, b, c, "\n", NULL));
}

__attribute__((noreturn)) static void refuse(const char *text) {
    say(text, "", "");
    leave(1);
}

__attribute__((noreturn)) static void left_alone(void) {
    refuse("its controller is gone, so this build has stopped; start it again, what is finished is kept.");
}
