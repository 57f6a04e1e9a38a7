/* The floor of `create` without a slot: groups, clone with every namespace, placement, mounts,
 * pivot and exec of a no-op, in one C program. A sample ends when the exec has happened; taking the
 * sandbox down again is not in it. */
#define _GNU_SOURCE
#include "floor.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

static double one_sandbox(const struct job *job) {
    double start = now_ms();
    int group = make_groups(job);
    int executed[2];
    if (pipe2(executed, O_CLOEXEC))
        die("pipe2");
    pid_t pid = clone_sandbox(job, group);
    if (pid == 0) {
        enter_root(job);
        execv(job->program, (char *[]){(char *)job->program, NULL});
        die(job->program);
    }
    /* Closed by the exec: end of file. */
    close(executed[1]);
    char byte;
    ssize_t size = read(executed[0], &byte, 1);
    double elapsed = now_ms() - start;
    close(executed[0]);
    if (group >= 0)
        close(group);
    int status;
    if (size != 0 || waitpid(pid, &status, 0) != pid || status != 0) {
        fputs("the sandbox failed\n", stderr);
        remove_groups(job);
        _exit(1);
    }
    remove_groups(job);
    return elapsed;
}

int main(int argc, char **argv) {
    struct job job;
    (void)argc;
    parse_job(&job, argv + 1);
    for (long count; (count = next_count()) > 0;) {
        for (long i = 0; i < count; i++)
            print_sample(one_sandbox(&job));
        end_samples();
    }
    return 0;
}
