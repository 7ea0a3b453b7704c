// The main of the tests that need only the standard library (and Catch2).
int run_tests(int argc, char** argv);  // of catch_session.cpp

int main(int argc, char** argv) {
  return run_tests(argc, argv);
}
