/* Programs by their names: links, and the folders of a PATH, of which some hold launchers of ours. */

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
