# cmake -DBINARY=file -P remove_rpath.cmake: removes from a program's or library's run-time path what is not relative to the
# file.
file(READ_ELF "${BINARY}" RUNPATH path RPATH inherited CAPTURE_ERROR error)
list(FILTER path INCLUDE REGEX "^[$]ORIGIN")
if(path)
  list(JOIN path ":" path)
  file(RPATH_SET FILE "${BINARY}" NEW_RPATH "${path}")
else()
  file(RPATH_REMOVE FILE "${BINARY}")
endif()
