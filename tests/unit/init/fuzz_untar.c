/*
 * fuzz_untar.c - archives that went through a mutator, unpacked by the real code.
 *
 * fuzz_untar SEED ITERATIONS DIRECTORY ARCHIVE...: each round changes one of the archives and unpacks
 * it into DIRECTORY/target, in a child. Most rounds repair the headers' checksums, or little would
 * come past the first. Prints how many were taken whole. Ends with 1 at the first child that does not
 * end by itself, and with 3 if anything but the target was changed in DIRECTORY.
 */
#include "file_stubs.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define ARCHIVE_MAX (1u << 20)

static uint64_t state;

static uint32_t random_below(uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % n;
}

static size_t load(const char *path, uint8_t *into) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, into, ARCHIVE_MAX);
    if (got <= 0)
        exit(2);
    close(fd);
    return (size_t)got;
}

/* Bytes that mean something where they may land. */
static void mutate(uint8_t *data, size_t *size) {
    static const char interesting[] = "\0/.0123456789=\n \x80\xff";
    static const char *const words[] = {"../",     "/etc",  "./",    "a/b/",
                                        "7777777", "path=", "size=", "99999999999999999999"};
    for (uint32_t n = 1 + random_below(6); n; n--) {
        size_t at = random_below((uint32_t)*size);
        uint32_t how = random_below(8);
        if (how < 3) {
            data[at] = (uint8_t)interesting[random_below(sizeof interesting - 1)];
        } else if (how < 5) {
            data[at] = (uint8_t)random_below(256);
        } else if (how == 5) {
            const char *word = words[random_below(sizeof words / sizeof *words)];
            size_t len = strlen(word);
            if (at + len <= *size)
                memcpy(data + at, word, len);
        } else if (how == 6) { /* another type, mostly one that is known */
            static const char types[] = "01234567xgLKSVD";
            data[at / TAR_BLOCK * TAR_BLOCK + offsetof(struct tar_header, type)] =
                (uint8_t)types[random_below(sizeof types - 1)];
        } else { /* a block over another */
            size_t blocks = *size / TAR_BLOCK;
            memmove(data + random_below((uint32_t)blocks) * TAR_BLOCK,
                    data + random_below((uint32_t)blocks) * TAR_BLOCK, TAR_BLOCK);
        }
    }
    if (random_below(20) == 0)
        *size = 1 + random_below((uint32_t)*size);
}

static void repair(uint8_t *data, size_t size) {
    for (size_t at = 0; at + TAR_BLOCK <= size; at += TAR_BLOCK) {
        struct tar_header header;
        memcpy(&header, data + at, sizeof header);
        if (memcmp(header.magic, "ustar", 5))
            continue;
        snprintf(header.checksum, sizeof header.checksum, "%06o", tar_checksum(&header, false));
        header.checksum[7] = ' ';
        memcpy(data + at, &header, sizeof header);
    }
}

static int entries_of(const char *path) {
    DIR *dir = opendir(path);
    int count = 0;
    while (dir && readdir(dir))
        count++;
    if (dir)
        closedir(dir);
    return count;
}

int main(int argc, char **argv) {
    static uint8_t original[ARCHIVE_MAX], data[ARCHIVE_MAX];
    static struct inbox in;
    if (argc < 5)
        return 2;
    state = strtoull(argv[1], NULL, 10);
    struct record *record =
        mmap(NULL, sizeof *record, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct child child = {.record = record,
                          .client_fd = -1,
                          .root_fd = open(argv[3], O_PATH | O_DIRECTORY | O_CLOEXEC),
                          .proc_fd = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC),
                          .dev_fd = -1};
    struct file_req req = {
        .op = FILE_UNPACK, .flags = FILE_PARENTS, .depth = 64, .length = 1u << 24, .entries = 4096};
    static const char strings[] = "0\0/target\0";
    memcpy(in.payload, &req, sizeof req);
    memcpy(in.payload + sizeof req, strings, sizeof strings);
    in.head = (struct msg){M_FILE, 1, sizeof req + sizeof strings, 0};
    int before = entries_of(argv[3]), null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    unsigned long taken = 0;
    for (unsigned long left = strtoul(argv[2], NULL, 10); left; left--) {
        size_t size = load(argv[4 + random_below((uint32_t)argc - 4)], original);
        memcpy(data, original, size);
        mutate(data, &size);
        if (random_below(10))
            repair(data, size);
        int fd = memfd_create("archive", MFD_CLOEXEC);
        if (write(fd, data, size) != (ssize_t)size || lseek(fd, 0, SEEK_SET))
            return 2;
        in.fds[0] = fd;
        in.fds[1] = null;
        in.fd_count = 2;
        memset(record, 0, sizeof *record);
        int status;
        pid_t pid = fork();
        if (pid == 0)
            file_child(&child, &in);
        if (pid < 0 || waitpid(pid, &status, 0) != pid)
            return 2;
        close(fd);
        bool clean = WIFEXITED(status) && WEXITSTATUS(status) <= 1 &&
                     (WEXITSTATUS(status) == 1) == (record->failure.step != STEP_NONE);
        if (!clean) {
            fprintf(stderr, "status %d, step %u, %lu rounds before the end\n", status,
                    record->failure.step, left);
            return 1;
        }
        taken += record->failure.step == STEP_NONE;
        if (entries_of(argv[3]) != before)
            return 3;
    }
    printf("%lu\n", taken);
    return 0;
}
