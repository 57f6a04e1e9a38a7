/*
 * rival.c - what a policy could do to the command that judges it, and the judge that looks.
 *
 *   rival respawn   a process that is never the same: it forks and its parent ends
 *   rival daemon    forked twice, in a session of its own
 *   rival storm     forks until it is refused, and so do all its children
 *   rival tracer    tries to trace every process there is
 *   rival watcher   counts what happens in /judge, by inotify
 *   rival stopped   stops itself, with a child that goes on
 *   rival waiting   a parent that the kernel keeps in vfork(2), uninterruptible
 *   rival judge     prints how many other processes there are, how many of the rivals counted on
 *                   while it looked, and who traces it
 *
 * Each counts in a page of /tmp/beats that all share: that is how one sees from outside that it runs.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *const NAMES[] = {"respawn", "daemon",  "storm",  "tracer",
                                    "watcher", "stopped", "waiting"};
#define COUNT (sizeof NAMES / sizeof *NAMES)
static volatile unsigned long *beats;

static void nap(void) {
    usleep(1000);
}

static int each_process(void (*visit)(pid_t)) {
    int count = 0;
    DIR *proc = opendir("/proc");
    for (struct dirent *entry; proc && (entry = readdir(proc));) {
        pid_t pid = atoi(entry->d_name);
        if (!isdigit(*entry->d_name) || pid == 1 || pid == getpid())
            continue;
        count++;
        if (visit)
            visit(pid);
    }
    if (proc)
        closedir(proc);
    return count;
}

static void seize(pid_t pid) {
    ptrace(PTRACE_SEIZE, pid, 0, 0);
}

static int tracer_of_self(void) {
    char line[256];
    int tracer = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        sscanf(line, "TracerPid: %d", &tracer);
    return tracer;
}

static int judge(void) {
    unsigned long before[COUNT];
    int moved = 0, others = 0, tracer = 0;
    for (size_t i = 0; i < COUNT; i++)
        before[i] = beats[i];
    for (int i = 0; i < 60; i++) {
        int now = each_process(NULL);
        others = now > others ? now : others;
        tracer = tracer ? tracer : tracer_of_self();
        nap();
    }
    for (size_t i = 0; i < COUNT; i++)
        moved += beats[i] != before[i];
    printf("%d %d %d\n", others, moved, tracer);
    return 0;
}

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "";
    int fd = open("/tmp/beats", O_RDWR | O_CREAT, 0666);
    fchmod(fd, 0666);
    if (fd < 0 || ftruncate(fd, 4096))
        return 1;
    beats = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!strcmp(mode, "judge"))
        return judge();
    size_t which = 0;
    while (which < COUNT && strcmp(NAMES[which], mode))
        which++;
    if (which == COUNT)
        return 2;
    volatile unsigned long *beat = &beats[which];
    signal(SIGCHLD, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    for (int i = 0; i < 2; i++) { /* nobody's child, in a session of its own */
        if (fork())
            _exit(0);
        setsid();
    }
    for (int i = 0; i < 3; i++)
        close(i);
    if (!strcmp(mode, "stopped") && !fork())
        raise(SIGSTOP);
    if (!strcmp(mode, "waiting") && fork()) {
        if (vfork() == 0)
            for (;;)
                pause();
    }
    int notify = -1;
    if (!strcmp(mode, "watcher")) {
        notify = inotify_init1(IN_NONBLOCK);
        if (inotify_add_watch(notify, "/judge", IN_ALL_EVENTS) < 0)
            _exit(3);
        ++*beat;
    }
    for (;; usleep(strcmp(mode, "storm") ? 5000 : 40000)) {
        if (notify >= 0) {
            char events[4096];
            if (read(notify, events, sizeof events) > 0)
                ++*beat;
            continue;
        }
        ++*beat;
        if (!strcmp(mode, "respawn") && fork() > 0)
            _exit(0);
        if (!strcmp(mode, "storm") && fork() < 0 && getpid() % 4 == 0)
            _exit(0); /* some make room, so that others can be started beside it */
        if (!strcmp(mode, "tracer") && fork() == 0) {
            each_process(seize);
            usleep(4000);
            _exit(0); /* and lets go of all, or the other rivals would stand still at a signal */
        }
    }
}
