/* fewbits build's one C file, compiled on first use. Linux only.
 *
 * With -DLAUNCHER: the small program that stands in a compiler's place. It asks the controller when to
 * start, runs the real tool in a process group of its own, reports how it ended, and does what it is told:
 * end with that code, or run the tool again. Without a controller it becomes the real tool.
 *
 * Without: the pager, a library that is preloaded into compilers. It does nothing until SIGURG (whose default
 * is to be ignored) asks it to write the process's private memory into unlinked files and to map those files,
 * privately, in its place: the memory is free, and every page comes back from the disk when it is touched.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef LAUNCHER
/* It starts for every compilation, and a C library's own start takes longer than all it does: so it talks to
 * the kernel itself, on the two processors that this is for. */
#include <sys/signalfd.h>

#define FIELDS 8
#define TELL_AFTER_NS 60000000L
#define QUICK_NS 250000000L /* what succeeds sooner is not kept: no word from the controller is awaited */
#define MOST_WORDS (60 << 10)
static char message[1 << 18];
static char self[4096], run_folder[4096];
static char **variables;

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

/* Runs that only print or list something: they need little memory and are not held up. */
static int is_light(int argc, char **argv) {
    static const char words[][28] = {"-E", "-M", "-MM", "--version", "-V", "-dumpversion", "-dumpmachine",
                                     "-dumpfullversion", "-###", "--dryrun", "-dryrun", "--help", "-h", "-qversion",
                                     "--list-gpu-arch", "--list-gpu-code", "-dumpspecs", "--preprocess",
                                     "--generate-dependencies"};
    if (argc < 2 || (argc == 2 && (same(argv[1], "-v") || same(argv[1], "-vV")))) return 1;
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') continue;
        if (after(argv[i], "-print-") || after(argv[i], "--print-")) return 1;
        for (size_t k = 0; k < sizeof words / sizeof *words; k++)
            if (same(argv[i], words[k])) return 1;
    }
    return 0;
}

static int parent_of(int pid) {
    char path[64], text[512];
    join(path, sizeof path, "/proc/", decimal(pid), "/stat", NULL);
    long fd = open_file(path, O_RDONLY);
    if (fd < 0) return 0;
    long n = CALL(read, fd, text, sizeof text - 1);
    close_file(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    char *end = last_of(text, ')'); /* ") S 123": the state, and the parent */
    return end && end + 4 < text + n ? (int)number(end + 4) : 0;
}

/* The folder of the run that we belong to: named by the environment, or, where that was cleaned, by the
 * process id of one of our ancestors. */
static int find_run(void) {
    const char *named = variable("FEWBITS_BUILD");
    if (named && *named) return join(run_folder, sizeof run_folder, named, NULL) > 0;
    char root[sizeof self], *tools = NULL;
    join(root, sizeof root, self, NULL);
    for (char *p = root; (p = find(p, "/tools/")); p++) tools = p;
    if (!tools) return 0;
    *tools = 0;
    for (int pid = (int)CALL(getppid, 0); pid > 1; pid = parent_of(pid)) {
        if (!join(run_folder, sizeof run_folder, root, "/runs/", decimal(pid), NULL)) return 0;
        if (CALL(faccessat, AT_FDCWD, run_folder, F_OK) == 0) return 1;
    }
    return 0;
}

static int connect_to(const char *folder) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    long dir = open_file(folder, O_PATH | O_DIRECTORY);
    if (dir < 0) return -1;
    long fd = CALL(socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), failed;
    join(address.sun_path, sizeof address.sun_path, "/proc/self/fd/", decimal(dir), "/sock", NULL);
    while ((failed = CALL(connect, fd, &address, sizeof address)) < 0) {
        if (failed == -EINTR) continue;
        if (failed == -EAGAIN) { /* the queue of new connections is full */
            struct timespec soon = {0, 2000000};
            CALL(nanosleep, &soon, NULL);
            continue;
        }
        close_file(fd);
        fd = -1;
        break;
    }
    close_file(dir);
    return (int)fd;
}

static void tell(int fd, const char *text, size_t size) {
    while (CALL(sendto, fd, text, size, MSG_NOSIGNAL, NULL, 0) == -EINTR) NOTHING;
}

/* Ask for a turn: our parent, the tool, and, if it is not too much, our folder and arguments. */
static void ask(int fd, const char *tool, int argc, char **argv) {
    size_t size = join(message, sizeof message, "H", decimal(CALL(getppid, 0)), " ", tool, NULL) + 1, whole = size;
    for (int i = 0; i < argc && whole < MOST_WORDS; i++) whole += strlen(argv[i]) + 1;
    if (size > 1 && whole < MOST_WORDS) {
        long n = CALL(getcwd, message + size, sizeof message - whole); /* with its NUL */
        if (n > 0 && message[size] == '/') {
            size += (size_t)n;
            for (int i = 0; i < argc; i++) {
                size_t length = strlen(argv[i]) + 1;
                memcpy(message + size, argv[i], length);
                size += length;
            }
        }
    }
    tell(fd, message, size - 1);
}

/* Wait for an order; its NUL-separated fields. Returns their number, or 0 when the controller is gone. */
static int hear(int fd, char **fields, int max) {
    long n;
    while ((n = CALL(recvfrom, fd, message, sizeof message - 1, 0, NULL, NULL)) == -EINTR) NOTHING;
    if (n <= 0) return 0;
    message[n] = 0;
    int count = 0;
    for (char *p = message; p < message + n && count < max; p += strlen(p) + 1) fields[count++] = p;
    return count;
}

static void pour(int from, int to) {
    long n;
    if (from < 0) return;
    CALL(lseek, from, 0, SEEK_SET);
    while ((n = CALL(read, from, message, sizeof message)) > 0) write_all(to, message, (size_t)n);
}

static void forget(int fd) {
    if (fd >= 0 && CALL(ftruncate, fd, 0) == 0) CALL(lseek, fd, 0, SEEK_SET);
}

static int is_terminal(int fd) {
    char settings[256];
    return CALL(ioctl, fd, 0x5401 /* TCGETS */, settings) == 0;
}

/* What a tool prints is held back until it is known that the attempt counts; a terminal gets it at once. */
static void capture(int kept[3]) {
    struct stat out, err;
    int has_out = CALL(fstat, 1, &out) == 0;
    kept[1] = kept[2] = -1;
    if (has_out && !is_terminal(1)) kept[1] = (int)CALL(memfd_create, "out", 1 /* MFD_CLOEXEC */);
    if (CALL(fstat, 2, &err) != 0 || is_terminal(2)) return;
    if (kept[1] >= 0 && out.st_dev == err.st_dev && out.st_ino == err.st_ino)
        kept[2] = kept[1];
    else
        kept[2] = (int)CALL(memfd_create, "err", 1);
}

/* The tool's environment: ours, and the pager in front of what is preloaded already. */
static char **environment(char **order) {
    static char preload[8192], pages[4096];
    size_t count = 0;
    if (!*order[3]) return variables;
    while (variables[count]) count++;
    size_t size = (count + 3) * sizeof(char *);
    char **made = (char **)CALL(mmap, NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), **last = made;
    if ((unsigned long)made > -4096UL) return variables;
    const char *before = variable("LD_PRELOAD");
    int has = before && *before;
    if (!join(preload, sizeof preload, "LD_PRELOAD=", order[3], has ? ":" : "", has ? before : "", NULL)) return variables;
    join(pages, sizeof pages, "FEWBITS_PAGER=", order[4], NULL);
    for (char **e = variables; *e; e++)
        if (!after(*e, "LD_PRELOAD=") && !after(*e, "FEWBITS_PAGER=")) *last++ = *e;
    *last++ = preload;
    *last++ = pages;
    return made;
}

/* In the child, which shares our memory until it becomes the tool: nothing here may write to it. */
__attribute__((noreturn, noinline)) static void become(const char *tool, char **args, char **environ_, char **order,
                                                      const int kept[3], long parent, const uint64_t *before) {
    CALL(setpgid, 0, 0);
    CALL(prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (CALL(getppid, 0) != parent) leave(127); /* it was gone before that took effect */
    unsigned long cap = (unsigned long)number(order[1]);
    struct rlimit limit;
    if (cap && CALL(prlimit64, 0, RLIMIT_DATA, NULL, &limit) == 0 && limit.rlim_cur > cap) { /* infinity is the largest */
        limit.rlim_cur = cap;
        CALL(prlimit64, 0, RLIMIT_DATA, &limit, NULL);
    }
    long fd = *order[2] ? open_file("/proc/self/oom_score_adj", O_WRONLY) : -1;
    if (fd >= 0) {
        write_all((int)fd, order[2], strlen(order[2]));
        close_file(fd);
    }
    for (int i = 1; i <= 2; i++)
        if (kept[i] >= 0) CALL(dup3, kept[i], i, 0);
    CALL(rt_sigprocmask, SIG_SETMASK, before, NULL, 8);
    long failed = CALL(execve, tool, args, environ_);
    say("cannot run ", tool, failed == -ENOENT ? ": No such file or directory" : failed == -EACCES ? ": Permission denied" : "");
    leave(127);
}

/* The child goes on in our stack below this frame, and never returns from here. */
__attribute__((noinline)) static long spawn(const char *tool, char **args, char **environ_, char **order,
                                           const int kept[3], const uint64_t *before) {
    long parent = CALL(getpid, 0), pid = CALL(clone, 0x4100 | SIGCHLD /* CLONE_VM, CLONE_VFORK */, 0, 0, 0, 0);
    if (pid == 0) become(tool, args, environ_, order, kept, parent, before);
    return pid;
}

static long start(const char *tool, char **argv, char **order, int count, const int kept[3], const uint64_t *before) {
    char **args = argv;
    long replaced = count > 5 ? number(order[5]) : 0;
    if (replaced > 0) {
        size_t size = (size_t)(replaced + 2) * sizeof *args;
        args = (char **)CALL(mmap, NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if ((unsigned long)args > -4096UL) return -ENOMEM;
        args[0] = argv[0];
        char *p = order[5] + strlen(order[5]) + 1;
        for (long i = 1; i <= replaced; i++, p += strlen(p) + 1) args[i] = p;
    }
    long pid = spawn(tool, args, environment(order), order, kept, before);
    if (pid > 0) CALL(setpgid, pid, pid);
    return pid;
}

/* Wait for the tool; pass signals on to its group. Returns the signal that came, if any. The controller is told
 * of the tool's process only when it lives for a while: of short ones it need not know. */
static int attend(int fd, int signals, long pid) {
    struct pollfd waits[2] = {{.fd = signals, .events = POLLIN}, {.fd = fd, .events = POLLIN}};
    int ended = 0, told = 0;
    for (;;) {
        siginfo_t info = {0};
        struct timespec patience = {0, TELL_AFTER_NS};
        if (CALL(waitid, P_PID, pid, &info, WEXITED | WNOWAIT | WNOHANG, NULL) == 0 && info.si_pid == pid) return ended;
        long ready = CALL(ppoll, waits, 2, told ? NULL : &patience, NULL, 8);
        if (ready < 0) continue;
        if (ready == 0) {
            char text[32];
            tell(fd, text, join(text, sizeof text, "S ", decimal(pid), NULL));
            told = 1;
            continue;
        }
        if (waits[1].revents) { /* only its end comes unasked */
            CALL(kill, -pid, SIGKILL);
            while (CALL(wait4, pid, NULL, 0, NULL) == -EINTR) NOTHING;
            left_alone();
        }
        struct signalfd_siginfo got;
        if (waits[0].revents && CALL(read, signals, &got, sizeof got) == sizeof got && got.ssi_signo != SIGCHLD) {
            ended = (int)got.ssi_signo;
            CALL(kill, -pid, got.ssi_signo);
            CALL(kill, -pid, SIGCONT);
        }
    }
}

static void now(struct timespec *time) { CALL(clock_gettime, CLOCK_MONOTONIC, time); }

static long since(const struct timespec *begun) {
    struct timespec time;
    now(&time);
    return (time.tv_sec - begun->tv_sec) * 1000000000L + time.tv_nsec - begun->tv_nsec;
}

__attribute__((noreturn)) static void end_as(int status, const uint64_t *before) {
    if (WIFSIGNALED(status)) { /* the build tool sees the same end as without us */
        struct rlimit none = {0, 0};
        unsigned long plain[8] = {0}; /* the kernel's struct sigaction: SIG_DFL and nothing else */
        CALL(prlimit64, 0, RLIMIT_CORE, &none, NULL);
        CALL(rt_sigaction, WTERMSIG(status), plain, NULL, 8);
        CALL(rt_sigprocmask, SIG_SETMASK, before, NULL, 8);
        CALL(kill, CALL(getpid, 0), WTERMSIG(status));
        leave(128 + WTERMSIG(status));
    }
    leave(WEXITSTATUS(status));
}

static long micros(const struct timeval *time) { return time->tv_sec * 1000000L + time->tv_usec; }

__attribute__((noreturn)) static void obey(int fd, const char *tool, char **argv, char **order, int count) {
    uint64_t watched = 0, before = 0; /* the kernel's sets of signals */
    static const int numbers[] = {SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) watched |= (uint64_t)1 << (numbers[i] - 1);
    CALL(rt_sigprocmask, SIG_BLOCK, &watched, &before, 8);
    int signals = (int)CALL(signalfd4, -1, &watched, 8, SFD_CLOEXEC), kept[3], status = 0;
    capture(kept);
    while (count > 4 && order[0][0] == 'R') {
        struct timespec begun;
        now(&begun);
        long pid = start(tool, argv, order, count, kept, &before);
        if (pid < 0) refuse("cannot start another process; see ulimit -u.");
        int signal_seen = attend(fd, signals, pid);
        siginfo_t info;
        struct rusage used = {0};
        CALL(waitid, P_PID, pid, &info, WEXITED | WNOWAIT, &used);
        int code = info.si_code == CLD_EXITED ? info.si_status : -info.si_status;
        char text[256];
        tell(fd, text, join(text, sizeof text, "E ", decimal(code), " ", decimal(used.ru_maxrss), " ",
                            decimal(micros(&used.ru_utime)), " ", decimal(micros(&used.ru_stime)), " ", decimal(kept[1]),
                            " ", decimal(kept[2]), " ", decimal(signal_seen), NULL));
        if (order[0][1] == 'Q' && code == 0 && !signal_seen && info.si_code == CLD_EXITED && since(&begun) < QUICK_NS) {
            close_file(fd);
            count = 0;
        } else {
            count = hear(fd, order, FIELDS - 1);
        }
        while (CALL(wait4, pid, &status, 0, NULL) == -EINTR) NOTHING;
        if (signal_seen || !count) break;
        if (order[0][0] == 'R') {
            forget(kept[1]);
            forget(kept[2]);
        }
    }
    char last[4096] = "";
    int override = count > 1 && order[0][0] == 'X' && *order[1] ? (int)number(order[1]) : -1;
    if (count > 3 && order[0][0] == 'X') join(last, sizeof last, order[3], NULL);
    pour(kept[1], 1);
    if (kept[2] != kept[1]) pour(kept[2], 2);
    write_all(2, last, strlen(last));
    if (override >= 0) leave(override);
    end_as(status, &before);
}

/* Where a link leads; 0 if it is none. */
static int follow(const char *link, char *target, size_t size) {
    long n = CALL(readlinkat, AT_FDCWD, link, target, size - 1);
    if (n <= 0) return 0;
    target[n] = 0;
    return 1;
}

/* The next folder of a PATH, and what follows it; NULL behind the last. */
static const char *next_folder(const char *path, char *dir, size_t size) {
    size_t n = 0;
    for (; *path && *path != ':'; path++)
        if (n < size - 1) dir[n++] = *path;
    dir[n] = 0;
    return *path ? path + 1 : NULL;
}

/* Whether a folder of the PATH is one of ours. */
static int has_launchers(char *dir) {
    char real[4200];
    return find(dir, "/tools/") && join(real, sizeof real, dir, "/.real", NULL) &&
           CALL(faccessat, AT_FDCWD, real, F_OK) == 0;
}

/* Take our folders from the PATH: a wrapper that runs the next compiler of its own name would find us, and we it,
 * for ever. nvcc keeps them, as the compilers that it starts are stages of their own. */
static void leave_our_folders_out(int argc, char **argv) {
    static char made[1 << 17]; /* no variable is longer */
    for (int i = 0; i < argc && argv[i][0] != '-'; i++) {
        char *name = last_of(argv[i], '/');
        if (same(name ? name + 1 : argv[i], "nvcc")) return;
    }
    for (char **e = variables; *e; e++) {
        const char *path = after(*e, "PATH=");
        if (!path || strlen(*e) >= sizeof made) continue;
        size_t used = join(made, sizeof made, "PATH=", NULL);
        for (int first = 1; path;) {
            char dir[4096];
            const char *folder = path;
            path = next_folder(path, dir, sizeof dir);
            if (has_launchers(dir)) continue;
            if (!first) made[used++] = ':';
            for (first = 0; *folder && *folder != ':'; folder++) made[used++] = *folder;
        }
        made[used] = 0;
        *e = made;
        return;
    }
}

/* A launcher's argument is looked for as a shell does, past our own folders. */
static char *on_path(char *tool) {
    static char found[4096];
    const char *path = variable("PATH");
    for (path = path ? path : "/usr/bin:/bin"; path;) {
        char dir[4096];
        path = next_folder(path, dir, sizeof dir);
        if (!has_launchers(dir) && join(found, sizeof found, dir, "/", tool, NULL) &&
            CALL(faccessat, AT_FDCWD, found, X_OK) == 0)
            return found;
    }
    return tool;
}

static int run(int argc, char **argv) {
    static char real[4096], direct[4096], link[8192];
    if (!follow("/proc/self/exe", self, sizeof self)) refuse("/proc is not mounted; mount it, or build without fewbits build.");
    char *name = last_of(self, '/') + 1, *tool = real;
    if (same(name, "fewbits-launch")) {
        if (argc < 2) refuse("this is the launcher of compilers; see fewbits build --help.");
        argv++, argc--;
        leave_our_folders_out(argc, argv);
        tool = argv[0];
    } else {
        char kept = *name;
        *name = 0; /* the folder */
        join(link, sizeof link, self, ".real/", NULL);
        *name = kept;
        join(link + strlen(link), sizeof link - strlen(link), name, NULL);
        if (!follow(link, real, sizeof real)) refuse("the real tool is not known; start fewbits build again.");
        argv[0] = real;
        leave_our_folders_out(argc, argv);
    }
    char *inside = find(tool, "/tools/") ? last_of(tool, '/') : NULL;
    if (inside) { /* CMake was given one of our names as the compiler: one launcher is enough */
        *inside = 0;
        join(link, sizeof link, tool, "/.real/", inside + 1, NULL);
        *inside = '/';
        if (follow(link, direct, sizeof direct)) tool = argv[0] = direct;
    }
    if (!find(tool, "/")) tool = argv[0] = on_path(tool); /* by its name gcc would look for itself, and find us */
    char *order[FIELDS];
    if (!is_light(argc, argv) && find_run()) {
        int fd = connect_to(run_folder), count = 0;
        if (fd < 0) left_alone();
        ask(fd, tool, argc, argv);
        count = hear(fd, order, FIELDS - 1);
        if (!count) left_alone();
        if (order[0][0] == 'X') { /* X, code, standard output, error stream */
            if (count > 2) write_all(1, order[2], strlen(order[2]));
            if (count > 3) write_all(2, order[3], strlen(order[3]));
            return (int)number(order[1]);
        }
        if (order[0][0] == 'R') obey(fd, tool, argv, order, count);
        close_file(fd);
    }
    long failed = CALL(execve, tool, argv, variables);
    say("cannot run ", tool, failed == -ENOENT ? ": No such file or directory" : ": it is no program for this machine");
    return 127;
}

/* The kernel leaves the number of arguments, these, and the variables on the stack. */
__attribute__((noreturn, used)) void begin(long *stack) {
    char **argv = (char **)(stack + 1);
    variables = argv + stack[0] + 1;
    leave(run((int)stack[0], argv));
}

#else /* the pager */
#include <pthread.h>

#define MAX_REGIONS 4096
#define MAX_FILES 200
#define CHUNK (8UL << 20)
#define SMALLEST (256UL << 10) /* regions below it are left alone */

typedef struct { uintptr_t start, end; uint64_t offset, inode; int pageable; } region;
static region regions[MAX_REGIONS];
static struct { int fd; uint64_t inode; } files[MAX_FILES];
static int num_files, num_regions;
static char folder[3072];
static char text[16384];
static uint64_t pagemap[2048];
static size_t page_bytes = 4096;

static int backing_file(void) {
    if (num_files >= MAX_FILES) return -1;
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) { /* a file system without O_TMPFILE */
        static char name[4096];
        static unsigned serial;
        snprintf(name, sizeof name, "%s/page-%d-%u", folder, (int)getpid(), serial++);
        fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd >= 0) unlink(name);
    }
    if (fd < 0) return -1;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, 300);
    if (high >= 0) {
        close(fd);
        fd = high;
    }
    /* Far longer than the region: mremap may let the mapping grow, and past the end there would be SIGBUS. */
    struct stat facts;
    if ((ftruncate(fd, (off_t)1 << 42) < 0 && ftruncate(fd, (off_t)1 << 38) < 0) || fstat(fd, &facts) < 0) {
        close(fd);
        return -1;
    }
    files[num_files].fd = fd;
    files[num_files].inode = facts.st_ino;
    return num_files++;
}

static int file_of(uint64_t inode) {
    for (int i = 0; i < num_files; i++)
        if (inode && files[i].inode == inode) return i;
    return -1;
}

static uint64_t number(const char **at, unsigned base) {
    uint64_t value = 0;
    for (;; (*at)++) {
        unsigned c = (unsigned char)**at, digit = c - '0' < 10u ? c - '0' : c - 'a' < 6u ? c - 'a' + 10 : 99;
        if (digit >= base) return value;
        value = value * base + digit;
    }
}

/* One line of /proc/self/maps, if it is private writable memory that may be paged. */
static int parse_line(const char *line, region *r) {
    r->start = number(&line, 16);
    r->end = number((line++, &line), 16);
    r->pageable = strncmp(line, " rw-p ", 6) == 0 && r->end - r->start >= SMALLEST;
    line += 6;
    r->offset = number(&line, 16);
    line = strchr(line + 1, ' '); /* past the device */
    if (!line) return 0;
    r->inode = number((line++, &line), 10);
    while (*line == ' ') line++;
    uintptr_t ours = (uintptr_t)regions;
    if (r->start <= ours && ours < r->end) return 0;
    if (r->inode) return strncmp(line, folder, strlen(folder)) == 0; /* ours: even the smallest counts */
    return r->pageable && (!*line || strcmp(line, "[heap]") == 0 || strncmp(line, "[anon", 5) == 0);
}

static int list_regions(void) {
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC), count = 0;
    size_t held = 0;
    ssize_t n;
    while (fd >= 0 && (n = read(fd, text + held, sizeof text - 1 - held)) > 0) {
        held += n;
        text[held] = 0;
        char *line = text, *end;
        while ((end = strchr(line, '\n'))) {
            *end = 0;
            if (parse_line(line, &regions[count]) && ++count == MAX_REGIONS) { /* not all can be known */
                close(fd);
                return 0;
            }
            line = end + 1;
        }
        held -= line - text;
        memmove(text, line, held);
    }
    if (fd >= 0) close(fd);
    return count;
}

static int wrote; /* whether the chunk had to be written */

static int write_range(int fd, uintptr_t from, uintptr_t to, uint64_t offset) {
    wrote = 1;
    while (from < to) {
        ssize_t n = pwrite(fd, (void *)from, to - from, offset);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return 0;
        from += n;
        offset += n;
    }
    return 1;
}

/* Write the pages of [from, to) that are not in the file as they are; `all` writes clean file pages too. */
static int write_chunk(int map, int fd, uintptr_t from, uintptr_t to, uint64_t offset, int all) {
    uintptr_t at = from, begun = 0;
    while (at < to) {
        size_t count = (to - at) / page_bytes;
        if (count > sizeof pagemap / sizeof *pagemap) count = sizeof pagemap / sizeof *pagemap;
        ssize_t n = pread(map, pagemap, count * 8, at / page_bytes * 8);
        if (n != (ssize_t)(count * 8)) return 0;
        for (size_t i = 0; i < count; i++, at += page_bytes) {
            int here = (pagemap[i] >> 62) != 0, clean = (pagemap[i] >> 61) & 1;
            int dirty = all || (here && !clean);
            if (dirty && !begun) begun = at;
            if (!dirty && begun) {
                if (!write_range(fd, begun, at, offset + (begun - from))) return 0;
                begun = 0;
            }
        }
    }
    return !begun || write_range(fd, begun, to, offset + (begun - from));
}

/* Whether another mapping shows a part of the same file: mremap may have grown one over what follows it. Then
 * neither may write there. */
static int is_shared(const region *r) {
    for (int i = 0; i < num_regions; i++) {
        const region *o = &regions[i];
        if (o == r || o->inode != r->inode) continue;
        if (o->offset < r->offset + (r->end - r->start) && r->offset < o->offset + (o->end - o->start)) return 1;
    }
    return 0;
}

static void page_out(int map, region *r) {
    int known = r->inode && !is_shared(r) ? file_of(r->inode) : -1, file = known < 0 ? backing_file() : known;
    if (file < 0) return;
    int fd = files[file].fd;
    uint64_t base = known < 0 ? 0 : r->offset;
    for (uintptr_t at = r->start; at < r->end; at += CHUNK) {
        uintptr_t to = at + CHUNK < r->end ? at + CHUNK : r->end;
        uint64_t offset = base + (at - r->start);
        /* Nothing is given up before it is written: a full disk leaves the rest where it is. */
        wrote = 0;
        if (!write_chunk(map, fd, at, to, offset, known < 0 && r->inode != 0)) return;
        if (known < 0) {
            if (mmap((void *)at, to - at, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd, offset) == MAP_FAILED)
                return;
        } else {
            syscall(SYS_madvise, at, to - at, MADV_DONTNEED);
        }
        if (!wrote) continue; /* clean pages are the kernel's to drop */
        sync_file_range(fd, offset, to - at, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
        posix_fadvise(fd, offset, to - at, POSIX_FADV_DONTNEED);
    }
    if (known < 0) r->inode = files[file].inode, r->offset = 0;
}

static int num_threads(void) {
    int fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC), count = 0;
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    const char *line = strstr(text, "\nThreads:\t");
    if (line) line += 10, count = number(&line, 10);
    return count;
}

static void on_request(int number) {
    int saved = errno, map = -1;
    (void)number;
    /* Another thread could write between our copy and the change of mapping. */
    if (num_threads() == 1) map = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (map >= 0) {
        num_regions = list_regions();
        for (int i = 0; i < num_regions; i++)
            if (regions[i].pageable) page_out(map, &regions[i]);
        close(map);
    }
    errno = saved;
}

/* After a fork two processes read the same files: neither may write to them again. */
static void after_fork(void) {
    for (int i = 0; i < num_files; i++) close(files[i].fd);
    num_files = 0;
}

/* Allocators expect zeros after MADV_DONTNEED; a private mapping of a file would give its old bytes back. */
int madvise(void *start, size_t size, int advice) {
    uintptr_t from = (uintptr_t)start, to = from + (size + page_bytes - 1) / page_bytes * page_bytes;
    for (int i = 0; advice == MADV_DONTNEED && i < num_regions; i++) {
        if (from < regions[i].start || regions[i].end < to || from == to) continue;
        void *got = mmap(start, to - from, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        if (got == start) return 0;
    }
    return (int)syscall(SYS_madvise, start, size, advice);
}

static int is_leaf(void) {
    static const char *const leaves[] = {"cc1", "cc1plus", "cudafe++", "cicc", "ptxas", "lto1", "f951", "nvlink", "cc1obj"};
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    char *name = strrchr(path, '/');
    for (size_t i = 0; name && i < sizeof leaves / sizeof *leaves; i++)
        if (strcmp(name + 1, leaves[i]) == 0) return 1;
    return 0;
}

__attribute__((constructor)) static void ready(void) {
    const char *named = getenv("FEWBITS_PAGER");
    if (!named || strlen(named) >= sizeof folder || !is_leaf()) return;
    strcpy(folder, named);
    page_bytes = sysconf(_SC_PAGESIZE);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    pthread_atfork(NULL, after_fork, after_fork);
    struct sigaction action = {.sa_handler = on_request, .sa_flags = SA_RESTART};
    sigaction(SIGURG, &action, NULL);
}
#endif
