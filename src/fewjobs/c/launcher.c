/* The launcher: the small program that stands in a compiler's place. Compiled on first use; Linux only.
 *
 * It asks the controller when to start, runs the real tool in a process group of its own, reports how it ended, and
 * does what it is told: end with that code, or run the tool again. Without a controller it becomes the real tool.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "freestanding.h"
#include "search_path.h"

#define FIELDS 8
#define TELL_AFTER_NS 60000000L
#define QUICK_NS 250000000L /* what succeeds sooner is not kept: no word from the controller is awaited */
#define MOST_WORDS (60 << 10)
static char message[1 << 18];
static char self[4096], run_folder[4096];

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
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        unsigned long handled[8] = {0}; /* the kernel's struct sigaction: 1 is SIG_IGN, as nohup has it */
        CALL(rt_sigaction, numbers[i], NULL, handled, 8);
        if (handled[0] != 1 || numbers[i] == SIGCHLD) watched |= (uint64_t)1 << (numbers[i] - 1);
    }
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
