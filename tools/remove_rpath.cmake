# cmake -DBINARY=file -P remove_rpath.cmake: what `cmake --install` does to a program's run-time path.
file(RPATH_REMOVE FILE "${BINARY}")
