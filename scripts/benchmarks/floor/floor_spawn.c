/* The floor of `exec`: spawn + wait of a no-op by the PID 1 of the same kind of sandbox, whose
 * seccomp filter was loaded once and is inherited. argv[1] is the file with the BPF program. */
#define _GNU_SOURCE
#include "floor.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <linux/filter.h>
#include <linux/seccomp.h>

enum { MAX_INSTRUCTIONS = 4096 }; /* BPF_MAXINSNS */

static void read_filter(const char *path, struct sock_fprog *filter) {
    static struct sock_filter instructions[MAX_INSTRUCTIONS];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        die(path);
    ssize_t size = read(fd, instructions, sizeof instructions);
    if (size <= 0 || (size_t)size % sizeof instructions[0] != 0) {
        fprintf(stderr, "%s: not a BPF program\n", path);
        _exit(1);
    }
    close(fd);
    filter->len = (unsigned short)((size_t)size / sizeof instructions[0]);
    filter->filter = instructions;
}

static void load_filter(const struct sock_fprog *filter) {
    if (prctl(PR_SET_NO_NEW_PRIVS, 1UL, 0UL, 0UL, 0UL))
        die("PR_SET_NO_NEW_PRIVS");
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, filter))
        die("seccomp");
}

static double one_spawn(const char *program) {
    double start = now_ms();
    pid_t pid;
    int status;
    char *const args[] = {(char *)program, NULL};
    errno = posix_spawn(&pid, program, NULL, NULL, args, (char *const[]){NULL});
    if (errno != 0)
        die(program);
    if (waitpid(pid, &status, 0) != pid || status != 0) {
        fputs("the program failed\n", stderr);
        _exit(1);
    }
    return now_ms() - start;
}

static int serve(const struct job *job, const struct sock_fprog *filter) {
    enter_root(job);
    load_filter(filter);
    for (long count; (count = next_count()) > 0;) {
        for (long i = 0; i < count; i++)
            print_sample(one_spawn(job->program));
        end_samples();
    }
    return 0;
}

int main(int argc, char **argv) {
    struct job job;
    struct sock_fprog filter;
    if (argc < 2)
        return 2;
    parse_job(&job, argv + 2);
    read_filter(argv[1], &filter);
    int group = make_groups(&job);
    pid_t pid = clone_sandbox(&job, group);
    if (pid == 0)
        return serve(&job, &filter);
    int status;
    if (waitpid(pid, &status, 0) != pid)
        die("waitpid");
    remove_groups(&job);
    return status == 0 ? 0 : 1;
}
