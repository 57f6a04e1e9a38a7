/*
 * file_driver.c - one file operation without a sandbox, as whoever runs it.
 *
 * file_driver DIRECTORY FD...: the directory is the root, the fds are those of M_FILE, whose payload
 * comes on stdin; the payload of R_EXIT goes to stdout.
 */
#include "file_stubs.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv) {
    static struct inbox in;
    struct exited out = {0};
    struct record *record =
        mmap(NULL, sizeof *record, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (argc < 2 || argc > 2 + MSG_FDS_MAX || record == MAP_FAILED)
        return 2;
    ssize_t got = 0, more;
    while ((more = read(0, in.payload + got, MSG_MAX - (size_t)got)) > 0)
        got += more;
    in.head = (struct msg){M_FILE, 1, (uint32_t)got, 0};
    for (; in.fd_count < argc - 2; in.fd_count++)
        in.fds[in.fd_count] = atoi(argv[2 + in.fd_count]);
    struct child child = {.record = record,
                          .client_fd = -1,
                          .root_fd = open(argv[1], O_PATH | O_DIRECTORY | O_CLOEXEC),
                          .proc_fd = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC),
                          .dev_fd = -1};
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0); /* it has a session of its own */
        file_child(&child, &in);
    }
    for (int i = 0; i < in.fd_count; i++)
        close(in.fds[i]);
    if (pid < 0 || waitpid(pid, &out.status, 0) != pid)
        return 2;
    out.failure = record->failure;
    out.mode = record->mode;
    out.uid = record->uid;
    out.gid = record->gid;
    out.size = record->size;
    out.mtime_ns = record->mtime_ns;
    return write(1, &out, sizeof out) == sizeof out ? 0 : 2;
}
