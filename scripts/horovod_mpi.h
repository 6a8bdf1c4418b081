// For mpi_context.cc of Horovod 0.28.1.
#include <dlfcn.h>
#include <mpi.h>
#include <stdlib.h>
#include <unistd.h>
#include <string>

// The wheel of Open MPI was built for another folder, and finds its own by OPAL_PREFIX, which its mpirun
// sets. Without mpirun it is set here, and only for this call: a child process may start another MPI.
inline int init_in_place(int* argc, char*** argv, int required, int* provided) {
  Dl_info library;
  std::string prefix;
  if (getenv("OPAL_PREFIX") == nullptr && dladdr(reinterpret_cast<void*>(&MPI_Init_thread), &library) != 0) {
    if (char* path = realpath(library.dli_fname, nullptr)) {
      prefix = path;
      free(path);
      for (int level = 0; level < 2 && !prefix.empty(); ++level) prefix.resize(prefix.find_last_of('/'));
    }
  }
  bool is_wheel = false;
  for (const char* wrapper : {"/bin/orterun_wrapper", "/bin/ompirun_wrapper"})
    is_wheel = is_wheel || (!prefix.empty() && access((prefix + wrapper).c_str(), X_OK) == 0);
  if (is_wheel) setenv("OPAL_PREFIX", prefix.c_str(), 1);
  int code = MPI_Init_thread(argc, argv, required, provided);
  if (is_wheel)
    for (const char* name : {"OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "PMIX_PREFIX"}) unsetenv(name);
  return code;
}
#define MPI_Init_thread(...) init_in_place(__VA_ARGS__)
