/* probe - does in a sandbox what a shell cannot, or not fast enough. For tests only. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* Leave `count` dead children to PID 1: each is a grandchild whose parent does not wait. */
static int orphans(int count) {
    for (int i = 0; i < count; i++) {
        pid_t pid = fork();
        if (pid == 0)
            _exit(fork() < 0);
        if (pid < 0)
            return 1;
        if (waitpid(pid, NULL, 0) != pid)
            return 1;
    }
    return 0;
}

/* Escape from a session, a process group and a parent, then sleep. */
static int escape(int count) {
    for (int i = 0; i < count; i++)
        if (fork() == 0) {
            setsid();
            signal(SIGTERM, SIG_IGN);
            signal(SIGHUP, SIG_IGN);
            if (fork() == 0)
                for (;;)
                    pause();
            _exit(0);
        }
    while (wait(NULL) > 0)
        ;
    return 0;
}

/* Fork for ever, in all children too. */
_Noreturn static void storm(void) {
    signal(SIGTERM, SIG_IGN);
    for (;;)
        if (fork() < 0)
            usleep(1000);
}

static int facts(void) {
    struct rlimit limit;
    struct stat st;
    gid_t groups[128];
    char cwd[4096];
    int count = getgroups(128, groups);
    printf("ids %d %d %d %d\n", getuid(), geteuid(), getgid(), getegid());
    printf("groups");
    for (int i = 0; i < count; i++)
        printf(" %d", groups[i]);
    printf("\nsession %d\n", getsid(0) == getpid() && getpgrp() == getpid());
    printf("securebits %d\n", prctl(PR_GET_SECUREBITS, 0UL, 0UL, 0UL, 0UL));
    printf("nnp %d\n", prctl(PR_GET_NO_NEW_PRIVS, 0UL, 0UL, 0UL, 0UL));
    printf("seccomp %d\n", prctl(PR_GET_SECCOMP, 0UL, 0UL, 0UL, 0UL));
    printf("dumpable %d\n", prctl(PR_GET_DUMPABLE, 0UL, 0UL, 0UL, 0UL));
    mode_t mask = umask(0);
    printf("umask %o\n", mask);
    getrlimit(RLIMIT_NOFILE, &limit);
    printf("nofile %lu %lu\n", limit.rlim_cur, limit.rlim_max);
    getrlimit(RLIMIT_CORE, &limit);
    printf("core %lu %lu\n", limit.rlim_cur, limit.rlim_max);
    printf("cwd %s\n", getcwd(cwd, sizeof cwd) ? cwd : "?");
    printf("signals");
    for (int n = 1; n < 65; n++) {
        struct sigaction action;
        if (!sigaction(n, NULL, &action) && action.sa_handler != SIG_DFL)
            printf(" ignored:%d", n);
    }
    sigset_t blocked;
    sigprocmask(SIG_SETMASK, NULL, &blocked);
    for (int n = 1; n < 65; n++)
        if (sigismember(&blocked, n) == 1)
            printf(" blocked:%d", n);
    printf("\nfds");
    for (int fd = 0; fd < 1024; fd++)
        if (!fstat(fd, &st))
            printf(" %d:%s", fd,
                   S_ISFIFO(st.st_mode)  ? "pipe"
                   : S_ISCHR(st.st_mode) ? "char"
                                         : "other");
    printf("\n");
    return 0;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    int count = argc > 2 ? atoi(argv[2]) : 0;
    if (!strcmp(what, "orphans"))
        return orphans(count);
    if (!strcmp(what, "escape"))
        return escape(count);
    if (!strcmp(what, "storm"))
        storm();
    if (!strcmp(what, "facts"))
        return facts();
    return 2;
}
