/* What a peer takes: a command spawned and waited for, its output thrown away.
 *
 *     spawn_command ROOT|- PROGRAM [ARGUMENT...]
 *
 * With a ROOT the child changes its root to it first: that is chroot(2) and spawn, with no wall. A
 * child is made by vfork(2), as posix_spawn(3) does, for which the parent's size does not count. */
#define _GNU_SOURCE
#include "floor.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static double one_run(const char *root, char **command, int null) {
    double start = now_ms();
    pid_t pid = vfork();
    if (pid < 0)
        die("vfork");
    if (pid == 0) {
        if (dup2(null, 0) < 0 || dup2(null, 1) < 0)
            _exit(126);
        if (root && (chroot(root) || chdir("/")))
            _exit(126);
        execvp(command[0], command);
        _exit(127);
    }
    int status;
    if (waitpid(pid, &status, 0) != pid || status != 0) {
        fprintf(stderr, "%s failed: wait status %d\n", command[0], status);
        _exit(1);
    }
    return now_ms() - start;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fputs("arguments: ROOT|- PROGRAM [ARGUMENT...]\n", stderr);
        return 2;
    }
    const char *root = strcmp(argv[1], "-") == 0 ? NULL : argv[1];
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0)
        die("/dev/null");
    for (long count; (count = next_count()) > 0;) {
        for (long i = 0; i < count; i++)
            print_sample(one_run(root, argv + 2, null));
        end_samples();
    }
    return 0;
}
