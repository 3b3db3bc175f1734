# cmake -DBINARY=file -P remove_rpath.cmake: removes a program's run-time path, as `cmake --install` does.
file(RPATH_REMOVE FILE "${BINARY}")
